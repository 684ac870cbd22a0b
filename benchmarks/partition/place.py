"""Where ranks run: on one network or two, and with how much of a processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.partition.shares import Shares, shared
from benchmarks.partition.two_hosts import Network, network


@dataclass(frozen=True)
class Place:
    """What a rank enters.

    Attributes:
        network: of two hosts; None: all ranks on this one.
        shares: of processors; None: as the system deals them out.
    """

    network: Network | None = None
    shares: Shares | None = None

    def enter(self, rank: int, num_ranks: int, port: int) -> int | str:
        """Enter the network; return where ranks meet."""
        if self.network is None:
            return port
        return f'{self.network.enter(2 * rank // num_ranks)}{port}'

    def limit(self, rank: int) -> None:
        """Enter the share of a processor, when all is ready."""
        if self.shares is not None:
            self.shares.enter(rank)


@contextmanager
def made(megabits: float | None, shares: Sequence[float] | None) -> Iterator[Place]:
    """Make it; inside, ranks may enter.

    Args:
        megabits: a second, of the link between two hosts; None: there is one host.
        shares: of a processor, of each rank; None: none.

    Raises:
        OSError: this machine does not let us.
        ValueError: more is asked than it has.
    """
    with ExitStack() as stack:
        hosts = None if megabits is None else stack.enter_context(network(megabits))
        given = None if shares is None else stack.enter_context(shared(shares))
        yield Place(hosts, given)
