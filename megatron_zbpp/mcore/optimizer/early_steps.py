"""Early optimizer steps, before all ranks have agreed, and the forwards that run ahead then.

An iteration that began before its call must have begun with the program's weights. Ranks ask each
other while they compute. Where one has found a change, the iteration begins again from the state
that was kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config

from megatron_zbpp.analysis.run_ahead import rank_order
from megatron_zbpp.mcore import compat, side_effects
from megatron_zbpp.mcore.iteration.batch import Batch, NextIteration
from megatron_zbpp.mcore.iteration.preparation import prepare
from megatron_zbpp.mcore.iteration.stages import Arguments, same
from megatron_zbpp.mcore.job.rules import WAIT
from megatron_zbpp.mcore.optimizer import split_step
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import SideEffects
from megatron_zbpp.post_validation import STEP
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.post_validation.protocol import PartialReduction
from megatron_zbpp.post_validation.speculative_step import KEPT_BYTES
from megatron_zbpp.post_validation.watch import Watch, Watched, any_bits, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.guard import agreement
from megatron_zbpp.runtime.log import job_log, rank_log

RANDOM = 'random states'


class EntryState:
    """Random states, buffers, logged losses and gradients of one rank as they are now.

    Gradients that may be other than zero, `prefilled`, are kept if one is asked to `look`.
    """

    def __init__(self, models: Sequence[Any], look: bool) -> None:
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        tensors = [buffer for model in models for _, buffer in model.named_buffers()]
        tensors += map(compat.logged_values, losses.values())
        tensors += (value for value in mtp_losses.values() if isinstance(value, torch.Tensor))
        self._models, self._random = models, side_effects.random_states()
        self._entries = [(entries, dict(entries)) for entries in (losses, mtp_losses)]
        self._grads = [(p, p.grad) for model in models for p in model.parameters()]
        gradients = [buffer.grad_data for model in models for buffer in compat.ddp_buffers(model)]
        gradients += (grad for _, grad in self._grads if grad is not None)
        self.prefilled = look and any_bits(gradients)
        tensors += gradients if self.prefilled else []
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Make all as it was; gradients that nobody looked at are zero."""
        side_effects.set_random_states(*self._random)
        for entries, before in self._entries:
            entries.clear()
            entries.update(before)
        for model in self._models:
            if compat.ddp_buffers(model):
                if model.ddp_config.overlap_grad_reduce:
                    model.finish_grad_sync()  # under way
                model.zero_grad_buffer()
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.zero_()
        for tensor, value in self._tensors:
            tensor.copy_(value)


class Agreement:
    """A question to all ranks; its answer is there when the iteration ends at the latest."""

    def __init__(
        self,
        entry: EntryState,  # what the iteration of this rank began with
        watch: Watch | None,  # its weights; None: no forward of it had run ahead
        changes: list[str],  # what this rank has found
        device: torch.device,
    ) -> None:
        # whether a rank has found changes: a collective that nobody waits for here
        self.entry, self._watch, self._changes = entry, watch, changes
        rank, size = dist.get_rank(), dist.get_world_size()
        found = [rank if changes else size, size - entry.prefilled]
        flags = torch.empty(2, dtype=torch.int64, device=device)
        for flag, value in zip(flags, found, strict=True):
            flag.fill_(value)  # by a kernel: a copy from the host waits for forwards that run ahead
        differ = None if watch is None or changes else watch.differ()
        if differ is not None:  # on its device: the host does not wait for it
            flags[0] = torch.where(differ, rank, size)
        self._flags = split_step.Pending(flags, dist.ReduceOp.MIN)

    def verdict(self) -> tuple[int | None, bool]:
        """Return the first rank with a change, or None, and if a rank had gradients but zero."""
        changed, prefilled = self._flags.on_host().tolist()
        size = dist.get_world_size()
        return None if changed == size else changed, prefilled < size

    def found(self) -> str:
        """Return the changes that this rank has found, in words."""
        different = [] if self._watch is None else self._watch.different()
        return summary([*self._changes, *different])


class Watching:
    """Notices, on one rank, what the program changes; finds out whether another rank has."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch: Watch | None = None
        self._watched: tuple[list[torch.nn.Module], Watched] | None = None
        self._steps = 0  # that were early, on whatever rank

    @property
    def _hashes(self) -> bool:
        """True if values are compared behind this step: alike on all ranks."""
        every = self._session.settings.check_interval
        return self._steps < side_effects.FIRST or bool(every and self._steps % every == 0)

    def begin(self, batch: Batch) -> None:
        """Take note of the weights that forwards of this batch have run ahead with."""
        stages = {p.stage for p in batch.executor.record.passes}
        held = batch.lowered.placement.stages(batch.pipeline.rank())
        chunks = zip(held, batch.call.arguments.models, strict=True)
        models = [model for stage, model in chunks if stage in stages]
        self._watch = None
        if not models:
            return  # it has only received
        # looked for now and then, since that takes longer than all
        if self._hashes or self._watched is None or self._watched[0] != models:
            self._watched = models, side_effects.watched_of(models)
        self._watch = Watch(self._watched[1], self._hashes, unseen_by_autograd)

    def ask(self, models: list[torch.nn.Module], effects: SideEffects | None) -> Agreement:
        """Ask whether some rank has found a change; all ranks do, when the iteration is called for.

        `effects` are those of forwards that ran ahead, not committed; None: none did.
        """
        watch, self._watch = self._watch if effects is not None else None, None  # or stale
        changes = [] if watch is None else watch.changes()
        if effects is not None and effects.drawn_since():
            changes.append(RANDOM)
        entry = EntryState(models, self._hashes)
        self._steps += 1
        agreement = Agreement(entry, watch, changes, next(models[0].parameters()).device)
        if watch is not None:
            watch.hide()
        return agreement

    def stands(self, agreement: Agreement) -> bool:
        """Return True if no rank has found a change; else set this rank back to the beginning."""
        with self._session.watchdog.collective('whether weights changed after the optimizer step'):
            changed, prefilled = agreement.verdict()
        if changed is not None:
            agreement.entry.restore()
            if changed == dist.get_rank():
                rank_log.warning(
                    f'rank {changed}: {agreement.found()} changed between optimizer.step() and the '
                    'next iteration: the forwards that had run ahead were dropped, and the '
                    'iteration was run again on the weights as they are, which costs the time of '
                    'an iteration'
                )
        post_validation: Any = self._session.post_validation
        post_validation.after_iteration(changed is not None, prefilled)
        return changed is None


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
        if iterator is None:
            return None
        return self._replayed.setdefault(id(iterator), ReplayIterator(iterator))

    def take(self, arguments: Arguments) -> Batch | None:
        begun, self._begun = self._begun, None
        early, self._early = self._early, False
        latest = self.latest
        if not arguments.forward_only:
            self._repeats = latest is not None and _alike(latest, arguments)
            new = latest is not None and not self._repeats
            if new and not self._told:
                self._told = True
                job_log.warning(
                    WAIT,
                    'the data iterator, the model or forward_step_func is not the one of the '
                    'iteration before: pass the same in every iteration',
                )
            self.latest = arguments
        if arguments.forward_only or latest is None or not latest.same_size(arguments):
            early = False  # all ranks see that
            batch = None if begun is None else self._drop(begun[0])
        elif begun is not None and not self._repeats:  # other ranks need not know: nothing drops it
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
            for replay in self._replayed.values() if batch is None else ():
                replay.mark(keep=early)
            used = {id(iterator) for iterator in arguments.iterators}
            self._replayed = {i: t for i, t in self._replayed.items() if i in used or not t.idle}
        return batch

    def _commit(self, begun: Any, arguments: Arguments) -> Batch | None:
        if begun is None:
            return None
        batch, effects = begun
        effects.commit()
        batch.call.arguments = arguments  # each call asks how gradients are reduced
        return batch

    def stands(self) -> bool:
        agreement, self._agreement = self._agreement, None
        if agreement is None:
            return True
        stands = self._watching.stands(agreement)  # the ranks have known for long: nobody waits
        for replay in self._replayed.values():
            (replay.forget if stands else replay.rewind)()
        return stands

    def possible(self) -> bool:
        # there is data for the forwards, and they are expected to be asked for
        latest = self.latest
        if latest is None or not self._repeats:
            return False
        ahead = self.chunks_ahead(latest.num_microbatches)
        for iterator in {id(i): i for i in latest.iterators if i is not None}.values():
            replay = self._replayed[id(iterator)]
            chunks = [c for c, other in enumerate(latest.iterators) if other is iterator]
            each, uneven = divmod(replay.given, len(chunks) * latest.num_microbatches)
            if uneven or not replay.reserve(each * sum(chunk in chunks for chunk in ahead)):
                return False
        return True

    def chunks_ahead(self, num_microbatches: int) -> list[int]:
        """Return the chunk of each pass that this rank may run ahead."""
        iteration: Any = self._session.latest  # whose optimizer step is where this is asked
        group, rank = iteration.pp_group, iteration.pp_group.rank()
        lowered = self._session.programs.lowered(group.size(), num_microbatches, False)
        held, passes = lowered.placement.stages(rank), lowered.schedule.passes[rank]
        return [held.index(p.stage) for p in passes[: lowered.ahead[rank]]]

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
        self._early = clean
        if self._begun is None:
            return
        if clean:
            self._watching.begin(self._begun[0])
        else:
            begun, self._begun = self._begun, None
            self._drop(begun[0])

    def close(self) -> None:
        if self._begun is not None:
            self._drop(self._begun[0])
        # data that was drawn stays here, for when the same iterator is trained with again
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


_SPARED = 0.1  # of what is free: memory in parts cannot all be used


def most_kept(device: torch.device, share: float, limit: float | None) -> int:
    """Return bytes that may be kept beside the forwards that run ahead meanwhile.

    No activation is held when this is asked, so all that passes have needed is free, and forwards
    that run ahead need a `share` of it again. `limit` is in GiB; None: as many as there is room.
    """
    found = KEPT_BYTES
    if device.type == 'cuda':
        allocated = torch.cuda.memory_allocated(device)
        on_device, _ = torch.cuda.mem_get_info(device)
        free = on_device + torch.cuda.memory_reserved(device) - allocated
        by_passes = torch.cuda.max_memory_allocated(device) - allocated
        found = max(found, int((1 - _SPARED) * free - min(1.0, share) * by_passes))
    return found if limit is None else min(found, int(limit * (1 << 30)))


class EarlySteps:
    """Takes the steps of optimizers with post-validation where that is possible."""

    def __init__(self, session: Session, next_iteration: ForwardsAhead) -> None:
        self._session, self._next, self._possible = session, next_iteration, False
        self._optimizer: weakref.ref[MegatronOptimizer] | None = None
        self._alone: Any = None  # a group of this rank only
        self._reductions: dict[dist.ProcessGroup, PartialReduction] = {}

    @property
    def agreed(self) -> bool:
        """True if ranks need not ask each other for the result of the latest step."""
        return self._session.overlaps

    def step(self, optimizer: Any, original: Callable) -> Any:
        """Take one step; return the result of `original`, the optimizer's own `step`."""
        post_validation, iteration = self._session.post_validation, self._session.latest
        assert post_validation is not None and iteration is not None, 'else Megatron takes it'
        pp_group, call = iteration.pp_group, self._next.latest
        if call is None or not self._possible_for(optimizer, call):
            with self._session.watchdog.collective(STEP):
                return original(optimizer)
        if pp_group not in self._reductions:
            order = rank_order(self._session.programs.placement(pp_group.size()))
            device = next(call.models[0].parameters()).device
            self._reductions[pp_group] = PartialReduction(pp_group, order, device)

        def kept(device: torch.device) -> int:
            ahead = len(self._next.chunks_ahead(call.num_microbatches))
            # of the peak, what forwards ahead hold, and one more while it runs
            share = (ahead + 1) / max(1, *iteration.record.live)
            return most_kept(device, share, self._session.settings.kept_gib)

        split = split_step.SplitStep(optimizer, original, self._alone, kept)
        return post_validation.step(split, self._reductions[pp_group], self._next)

    def _possible_for(self, optimizer: MegatronOptimizer, call: Arguments) -> bool:
        known = self._optimizer and self._optimizer()
        if known is None:
            self._optimizer = weakref.ref(optimizer)
            self._possible = self._agree(optimizer, call)
        elif known is not optimizer and self._possible:
            self._possible = False
            job_log.warning(WAIT, 'there are several, and forwards need the steps of all')
        return self._possible

    def _agree(self, optimizer: MegatronOptimizer, call: Arguments) -> bool:
        with self._session.watchdog.collective('whether optimizer steps can be validated later'):
            config = get_model_config(call.models[0])
            reason = split_step.refusal(optimizer) or split_step.refusal_of_model(config)
            reason, iteration = reason or split_step.refusal_of_loop(), self._session.latest
            if iteration is not None and not iteration.schedule.placement.is_one_way:
                reason = reason or 'microbatches go both ways, so that no rank is the first'
            refused = agreement.reasons(reason)
            self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if refused:
            job_log.warning(WAIT, '; '.join(refused))
        return not refused
