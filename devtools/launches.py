"""Launches of one rank on an emulated device: when each starts, and which is stuck."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import (
    TCPStore,  # public in torch.distributed, but for type checkers
)
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

_LOOK = 0.001  # seconds between looks at what the others have done
_SPEAK = 0.5  # seconds until a rank says where it stands


class Stuck(RuntimeError):
    """A rank waits for something that will never come."""


class Device:
    """Records the launches of one rank while it is open; its groups are of no use afterwards.

    Args:
        synchronises: whether each pass waits for all that was launched before.
        in_order: whether all starts in the order of launch.
        patience: seconds after which what has not come never will.
    """

    current: Device | None = None

    def __init__(
        self, synchronises: bool = False, in_order: bool = False, patience: float = 60.0
    ) -> None:
        self.synchronises, self.in_order, self.patience = synchronises, in_order, patience
        self.store = _client()
        self.closed = False
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: dict[int, Work] = {}  # launched and not started, by number
        self._running: set[Work] = set()

    def __enter__(self) -> Device:
        Device.current = self
        self.store.delete_key(f'at {dist.get_rank()}')
        return self

    def __exit__(self, *_: object) -> None:
        Device.current = None
        self.close()

    def close(self) -> None:
        """Nothing starts any more, and nobody looks for what the others do."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def launch(self, work: Work) -> None:
        """Take note of an operation."""
        with self._changed:
            work.number = next(self._numbers)
            self._waiting[work.number] = work

    def start(self, work: Work) -> None:
        """Return when `work` may start: that before it on its communicator has ended."""
        with self._changed:
            if self.in_order:
                self._changed.wait_for(lambda: self.closed or min(self._waiting) == work.number)
            self._waiting.pop(work.number, None)
            self._running.add(work)
            self._changed.notify_all()

    def end(self, work: Work) -> None:
        """`work` is over."""
        with self._changed:
            work.over = True
            self._running.discard(work)
            self._changed.notify_all()

    def synchronize(self, *_: object) -> None:
        """Wait for all that was launched: torch.cuda.synchronize."""
        self.until(lambda: not self._waiting and not self._running, 'its device')

    @contextmanager
    def passing(self, what: object) -> Iterator[None]:
        """Compute meanwhile."""
        if self.synchronises:
            self.until(lambda: not self._waiting and not self._running, f'its device, in {what}')
        if self.in_order:
            self.until(lambda: not self._waiting, f'what was launched before {what}')
        yield

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`.

        Raises:
            Stuck: it is not met for long.
        """
        with self._changed:
            if self._changed.wait_for(condition, _SPEAK):
                return
        self._say(what)
        with self._changed:
            if self._changed.wait_for(condition, self.patience):
                return
        self._raise(what)

    def look(self, condition: Callable[[], bool], what: str | None = None) -> None:
        """Look for `condition`, which other ranks bring about.

        Raises:
            Stuck: it is not met for long, and this is the host, which waits for `what`.
        """
        begun = time.monotonic()
        while not self.closed and not condition():
            if what is not None and time.monotonic() - begun > self.patience:
                self._say(what)
                self._raise(what)
            time.sleep(_LOOK)

    def _words(self, what: str) -> str:
        with self._changed:
            running = [str(work) for work in self._running]
            waiting = [str(self._waiting[number]) for number in sorted(self._waiting)]
        parts = [f'{title}: {", ".join(works)}' for title, works in
                 (('running', running), ('not started', waiting)) if works]  # fmt: skip
        return ' | '.join([f'waits for {what}', *parts])

    def _say(self, what: str) -> None:
        self.store.set(f'at {dist.get_rank()}', self._words(what))

    def _raise(self, what: str) -> None:
        time.sleep(_SPEAK)  # the others may be about to say where they stand
        places = []
        for rank in range(dist.get_world_size()):
            if self.store.check([f'at {rank}']):
                places.append(f'rank {rank} {self.store.get(f"at {rank}").decode()}')
        self.close()
        raise Stuck('; '.join(places))


def _client() -> Any:  # a Store; its stubs know no bytes
    """Return a connection of its own: others wait on theirs, and hold it meanwhile."""
    store: Any = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    own = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return PrefixStore('nccl', own)


class Work(distributed_c10d.Work):
    """One operation."""

    def __init__(self, device: Device, what: str, run: Callable[[], None]) -> None:
        super().__init__()
        self.run, self.over, self.number = run, False, -1
        self.error: Exception | None = None
        self._device, self._what = device, what

    def __str__(self) -> str:
        return self._what

    def is_completed(self) -> bool:
        return self.over

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._device.until(lambda: self.over, str(self))
        if self.error is not None:
            raise self.error
        return True
