"""The first forwards of an iteration that Megatron has not asked for yet."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_zbpp.mcore.iteration.arguments import Arguments, same
from megatron_zbpp.mcore.iteration.batch import Batch, NextIteration
from megatron_zbpp.mcore.iteration.preparation import prepare
from megatron_zbpp.mcore.job.rules import WAIT
from megatron_zbpp.mcore.optimizer.entry_check import Agreement, Watching
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import SideEffects
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.runtime.log import job_log


class ForwardsAhead(NextIteration):
    """Forwards of the next iteration that this rank runs ahead.

    It takes the next call to be like the latest one, once two were alike. Where an evaluation comes
    between, or the batch grows, what was run ahead is dropped: all ranks see that, and do the same.
    Where the program has changed weights since, which one rank alone may see, the iteration ends
    first, so that no message is left, and then runs again.
    """

    def __init__(self, session: Session) -> None:
        self.latest: Arguments | None = None  # the arguments of the latest training call
        self._session = session
        self._told = False  # that an iteration is not like the one before
        self._repeats = False  # the latest call was like the one before
        # by identity of their iterators, which they hold
        self._replayed: dict[int, ReplayIterator] = {}
        self._begun: tuple[Batch, SideEffects] | None = None
        self._early = False  # forwards of some rank may have begun
        self._watching = Watching(session)
        self._agreement: Agreement | None = None

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        """Return the iterator that chunks read for `iterator`, in training and evaluation."""
        if iterator is None or self._session.post_validation is None:
            return iterator
        return self._replayed.setdefault(id(iterator), ReplayIterator(iterator))

    def take(self, arguments: Arguments) -> Batch | None:
        """Return the batch that has been begun for this call; None: there is none.

        Raises:
            RuntimeError: one was begun with other data, another model or function; it cannot be
                dropped, because other ranks need not know.
        """
        begun, self._begun = self._begun, None
        early, self._early = self._early, False
        latest = self.latest
        if not arguments.forward_only:
            self._repeats = latest is not None and _alike(latest, arguments)
            if latest is not None and not self._repeats:
                self._tell()
            self.latest = arguments
        if arguments.forward_only or latest is None or not latest.same_size(arguments):
            early = False  # all ranks see that
            batch = None if begun is None else self._drop(begun[0])
        elif begun is not None and not self._repeats:
            raise RuntimeError(
                'the data iterator, the model or forward_step_func is not the one of the iteration '
                'before, with which this one was begun: pass the same in every iteration, or leave '
                'out --enable-optimizer-post-validation'
            )
        else:
            if early:
                self._agreement = self._watching.ask(arguments.models, begun and begun[1])
            batch = self._commit(begun, arguments)
        if not arguments.forward_only:
            self._keep_data(arguments, batch is not None, early)
        return batch

    def _commit(
        self, begun: tuple[Batch, SideEffects] | None, arguments: Arguments
    ) -> Batch | None:
        if begun is None:
            return None
        batch, effects = begun
        effects.commit()
        batch.call.arguments = arguments  # each call asks how gradients are reduced
        return batch

    def _keep_data(self, arguments: Arguments, begun: bool, early: bool) -> None:
        for replay in self._replayed.values():
            if not begun:
                replay.mark(keep=early)
        used = {id(iterator) for iterator in arguments.iterators}
        self._replayed = {i: t for i, t in self._replayed.items() if i in used or not t.idle}

    def stands(self) -> bool:
        """Return whether the passes that have just ended count.

        Else all is as when they began, on all ranks, and they run again. The ranks have known since
        the last of them began: nobody waits here.
        """
        agreement, self._agreement = self._agreement, None
        if agreement is None:
            return True
        stands = self._watching.stands(agreement)
        for replay in self._replayed.values():
            if stands:
                replay.forget()
            else:
                replay.rewind()
        return stands

    def _tell(self) -> None:
        """Say once why forwards of this iteration could not begin after the one before."""
        if self._session.post_validation is not None and not self._told:
            self._told = True
            job_log.warning(
                WAIT,
                'the data iterator, the model or forward_step_func is not the one of the iteration '
                'before: pass the same in every iteration',
            )

    def possible(self) -> bool:
        """Return whether there is data for the forwards, and they are expected to be asked for."""
        latest = self.latest
        if latest is None or not self._repeats:
            return False
        iterators = {id(i): i for i in latest.iterators if i is not None}
        return all(self._reserve(iterator, latest) for iterator in iterators.values())

    def _reserve(self, iterator: Iterator, latest: Arguments) -> bool:
        replay = self._replayed[id(iterator)]
        chunks = [c for c, other in enumerate(latest.iterators) if other is iterator]
        each, uneven = divmod(replay.given, len(chunks) * latest.num_microbatches)
        ahead = sum(chunk in chunks for chunk in self._chunks_ahead(latest.num_microbatches))
        return not uneven and replay.reserve(each * ahead)

    def _chunks_ahead(self, num_microbatches: int) -> list[int]:
        """Return the chunk of each pass that this rank may run ahead."""
        iteration = self._session.latest
        assert iteration is not None  # its optimizer step is where this is asked
        group = iteration.pp_group
        lowered = self._session.programs.lowered(group.size(), num_microbatches, False)
        held = lowered.placement.stages(group.rank())
        passes = lowered.schedule.passes[group.rank()][: lowered.ahead[group.rank()]]
        return [held.index(p.stage) for p in passes]

    def share_of_activations(self) -> float:
        """Return the share of the peak memory that activations of forwards that run ahead take.

        One more is counted, for what a forward needs while it runs.
        """
        iteration, latest = self._session.latest, self.latest
        assert iteration is not None and latest is not None, 'as where it is `possible`'
        ahead = len(self._chunks_ahead(latest.num_microbatches))
        return (ahead + 1) / max(1, *iteration.record.live)

    def run(self, ranks: int) -> None:
        """Run the forwards of this rank that go ahead if the first `ranks` of the chain do."""
        assert self.latest is not None
        batch, count = prepare(self._session, self, self.latest, ranks)
        if not count:
            return
        for replay in self._replayed.values():
            replay.mark(keep=True)
        effects = SideEffects(self.latest.models)
        watched = self._session.watchdog.forwards(batch.executor)
        with torch.enable_grad(), effects.capture(), watched:
            batch.executor.run_ahead(count)
        self._begun = batch, effects

    def settle(self, clean: bool) -> None:
        """Keep the forwards that have run for the next call, or drop them."""
        self._early = clean
        if self._begun is None:
            return
        if clean:
            self._watching.begin(self._begun[0])
        else:
            begun, self._begun = self._begun, None
            self._drop(begun[0])

    def close(self) -> None:
        """Drop models and activations on all ranks, until there is another iteration.

        Data that was drawn for it stays here, for when the same iterator is trained with again.
        """
        if self._begun is not None:
            self._drop(self._begun[0])
        self._replayed = {i: replay for i, replay in self._replayed.items() if not replay.idle}
        self.latest = self._begun = None
        self._repeats = self._early = False

    def _drop(self, batch: Batch) -> None:
        with self._session.watchdog.collective('messages of forwards that are dropped'):
            batch.executor.drop()
        for replay in self._replayed.values():
            replay.rewind()


def _alike(one: Arguments, other: Arguments) -> bool:
    return (
        one.forward_step_func == other.forward_step_func  # methods are made anew
        and same(one.models, other.models)
        and same(one.iterators, other.iterators)
        and one.pg_collection is other.pg_collection
    )
