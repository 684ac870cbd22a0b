"""Forwards of later batches that a call of an asynchronous schedule runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration.arguments import Arguments, same
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import (
    emptied,
    random_states,
    same_states,
    set_random_states,
    show_losses,
)
from megatron_zbpp.mcore.techniques.weight_watch import BetweenCalls, Unwritten
from megatron_zbpp.post_validation.data_iterators import ReplayIterator


class _Point(NamedTuple):
    """Where a forward in flight began."""

    random: tuple  # states
    given: dict[int, int]  # items of each replayed iterator since its mark


class ForwardsInFlight(NextIteration):
    """The forwards of later batches that a call runs, and what they have read and drawn.

    Between two calls the program finds random states as if they had not run. Where the next call
    is of another size or model, they are dropped, and what they have read is given again.
    """

    def __init__(self, session: Session) -> None:
        assert session.endless is not None, 'of an asynchronous schedule'
        self._session, self._endless = session, session.endless
        self._latest: Arguments | None = None  # whose forwards are in flight
        # by identity of their iterators, which they hold
        self._replayed: dict[int, ReplayIterator] = {}
        self._points: dict[int, _Point] = {}  # by microbatch in flight
        self._behind: tuple = ()  # random states behind those
        self._logged: list[tuple[int, dict[str, Any]]] = []  # by those microbatches, in order
        self._runs = False  # a call has begun and not ended
        self._between = BetweenCalls(session.settings.check_interval)
        self._endless.writing = self._between.step
        self._unwritten: dict[int, Unwritten] = {}  # by identity of chunks

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        """Return the iterator that replaces `iterator`, in training and evaluation alike."""
        if iterator is None:
            return None
        return self._replayed.setdefault(id(iterator), ReplayIterator(iterator))

    def take(self, arguments: Arguments) -> None:
        """Make the forwards in flight those of this call, or drop them.

        Raises:
            ValueError: a data iterator is another one, or evaluation reads that of training.
            NotImplementedError: the program has changed models since the call before.
        """
        latest = self._latest
        if arguments.forward_only:
            self._require_free(arguments)
            return
        self._between.end(arguments.models)
        if latest is not None and not same(latest.models, arguments.models):
            self.close()
        elif latest is not None and not latest.same_size(arguments):
            self.drop()
        elif latest is not None:
            if not same(latest.iterators, arguments.iterators):
                raise ValueError(
                    'the data iterator is not that of the call before, whose forwards have begun '
                    "this one: pass the same in every call, or have all ranks call the plugin's "
                    'drop_forwards() first'
                )
            self._go_on()
        self._latest, self._runs = arguments, True
        used = {id(iterator) for iterator in arguments.iterators}
        self._replayed = {i: t for i, t in self._replayed.items() if i in used or not t.idle}

    def _require_free(self, arguments: Arguments) -> None:
        replays = (self._replayed.get(id(iterator)) for iterator in arguments.iterators)
        if any(each is not None and not each.idle for each in replays):
            raise ValueError(
                'the data iterator of an evaluation is that of training, of which forwards of the '
                "next batch have read: give it its own, or have all ranks call the plugin's "
                'drop_forwards() first'
            )

    def _go_on(self) -> None:
        if self._points and same_states(random_states(), self._first.random):
            set_random_states(*self._behind)
        begun = self._endless.begun_with_next_call
        self._points = {j: point for j, point in self._points.items() if j >= begun}
        for _, losses in (each for each in self._logged if each[0] < begun):
            show_losses(losses)
        self._logged = [each for each in self._logged if each[0] >= begun]
        for i, replay in self._replayed.items():
            if self._points:
                replay.forget_until(self._first.given.get(i, 0))
            else:
                replay.forget()

    @property
    def _first(self) -> _Point:
        return self._points[min(self._points)]

    @contextmanager
    def forward(self, p: Pass, model: torch.nn.Module) -> Iterator[None]:
        """Take note of what a forward of a later batch has; raise where it leaves more."""
        if id(model) not in self._unwritten:
            self._unwritten[id(model)] = Unwritten(model)
        with self._unwritten[id(model)].forward(), self._ahead(p):
            yield

    @contextmanager
    def _ahead(self, p: Pass) -> Iterator[None]:
        """Take note of random states, data and logged losses of a forward of a later batch."""
        if not self._endless.is_ahead(p):
            yield
            return
        if not self._points:
            for replay in self._replayed.values():
                replay.mark(keep=True)
        given = {i: replay.given for i, replay in self._replayed.items()}
        self._points[p.microbatch] = _Point(random_states(), given)
        shown = compat.logged_losses()
        with emptied(shown):
            yield
            self._logged.append((p.microbatch, dict(shown)))

    def stands(self) -> bool:
        """Return True: no passes are run again; those of a call have ended."""
        if self._runs and self._points:
            self._behind = random_states()
            set_random_states(*self._first.random)
        if self._runs and self._latest is not None and self._endless.versions is not None:
            self._between.begin(self._latest.models)
        self._runs = False
        return True

    def drop(self) -> None:
        """Drop what is in flight, on all ranks; what it has read is given again."""
        if not self._runs:  # else a call has failed, and no more messages come
            with self._session.watchdog.collective('messages of forwards that are dropped'):
                self._endless.drop()
        for replay in self._replayed.values():
            replay.rewind()
        self._latest = None
        self._points.clear()
        self._logged.clear()

    def close(self) -> None:
        """Drop what is in flight, and leave parameters as their optimizer knows them."""
        if self._runs:
            return
        self._endless.finish_step()
        self.drop()
        self._endless.close()
        self._unwritten.clear()

    def possible(self) -> bool:
        """Return False: steps do not let forwards go ahead, calls do."""
        return False

    def run(self, ranks: int) -> None:
        """Run nothing."""

    def settle(self, clean: bool) -> None:
        """Drop what is in flight where the program says that its batch does not come."""
        if not clean:
            self.drop()
