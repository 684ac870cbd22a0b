"""Two networks on this machine, with a link of a given rate between them: Linux, as root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_CARD = 'eth0'
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_BURST = 16_000  # bytes that pass at once


@dataclass(frozen=True)
class Network:
    """The two, by name.

    Attributes:
        names: of the namespaces.
        meeting: a file by which processes of both find each other.
    """

    names: tuple[str, str]
    meeting: str

    def enter(self, side: int) -> str:
        """Put this process into one of them; return where ranks meet.

        Raises:
            OSError: that is not permitted.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f'/run/netns/{self.names[side]}') as file:
            if libc.setns(file.fileno(), _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        os.environ['GLOO_SOCKET_IFNAME'] = _CARD
        return self.meeting


def missing() -> str | None:
    """Why there can be none here; None if there can."""
    if os.geteuid() != 0:
        return 'network namespaces need root'
    lacking = [name for name in ('ip', 'tc') if shutil.which(name) is None]
    return f'there is no {lacking[0]} (Debian: apt-get install iproute2)' if lacking else None


@contextmanager
def network(megabits: float) -> Iterator[Network]:
    """Make them; inside, the link passes so many megabits a second, each way.

    Raises:
        OSError: this machine does not let us.
    """
    reason = missing()
    if reason is not None:
        raise OSError(f'two hosts: {reason}')
    made = tuple(f'zbpp{os.getpid()}{side}' for side in 'ab')
    folder = tempfile.mkdtemp()
    try:
        _make(made, megabits)
        yield Network((made[0], made[1]), str(Path(folder) / 'meeting'))
    finally:
        for name in made:
            with suppress(OSError):
                _run('ip', 'netns', 'delete', name)
        shutil.rmtree(folder)


def _make(names: tuple[str, ...], megabits: float) -> None:
    for name in names:
        _run('ip', 'netns', 'add', name)
    ends = [['name', _CARD, 'netns', name] for name in names]
    _run('ip', 'link', 'add', *ends[0], 'type', 'veth', 'peer', *ends[1])
    for number, name in enumerate(names, 1):
        _run('ip', '-n', name, 'address', 'add', f'10.0.0.{number}/24', 'dev', _CARD)
        for card in ('lo', _CARD):
            _run('ip', '-n', name, 'link', 'set', card, 'up')
        rate = ['rate', f'{megabits}mbit', 'burst', str(_BURST), 'limit', '10000000']
        _run('tc', '-n', name, 'qdisc', 'add', 'dev', _CARD, 'root', 'tbf', *rate)


def _run(*words: str) -> None:
    """Run a command.

    Raises:
        OSError: it failed; with what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f'{" ".join(words)}: {done.stderr.strip()}')
