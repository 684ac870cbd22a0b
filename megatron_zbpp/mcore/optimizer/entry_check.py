"""The check that an iteration that began before its call began with the program's weights.

Ranks ask each other while they compute. Where one has found a change, the iteration begins again
from the state that was kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration.batch import Batch
from megatron_zbpp.mcore.optimizer.split_step import read_behind, room_on_host
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import (
    FIRST,
    SideEffects,
    random_states,
    set_random_states,
    watched_of,
)
from megatron_zbpp.post_validation.watch import Watch, Watched, any_bits, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.log import rank_log

_Copies = list[tuple[torch.Tensor, torch.Tensor]]  # tensors, and what they were


@dataclass(frozen=True)
class EntryState:
    """Random states, buffers, logged losses and gradients of one rank."""

    models: list[torch.nn.Module]  # the chunks of this rank
    random: tuple  # states of random generators
    prefilled: bool  # whether gradients are other than zero; False where nobody looked
    _tensors: _Copies
    _entries: list[tuple[dict[str, Any], dict[str, Any]]]
    _grads: list[tuple[torch.nn.Parameter, torch.Tensor | None]]
    _gradients: _Copies

    @classmethod
    def of(cls, models: list[torch.nn.Module], look: bool) -> EntryState:
        """Keep the state of now; look at gradients that may be other than zero if `look`."""
        losses, mtp_losses = compat.logged_losses(), compat.logged_mtp_losses()
        tensors = [buffer for model in models for _, buffer in model.named_buffers()]
        tensors += map(compat.logged_values, losses.values())
        tensors += (value for value in mtp_losses.values() if isinstance(value, torch.Tensor))
        grads = [(p, p.grad) for model in models for p in model.parameters()]
        gradients = [gradient for model in models for gradient in compat.gradient_buffers(model)]
        gradients += (grad for _, grad in grads if grad is not None)
        prefilled = look and any_bits(gradients)
        return cls(
            models,
            random_states(),
            prefilled,
            _copies(tensors),
            [(entries, dict(entries)) for entries in (losses, mtp_losses)],
            grads,
            _copies(gradients) if prefilled else [],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Make all as it was; gradients that nobody looked at are zero."""
        set_random_states(*self.random)
        for entries, before in self._entries:
            entries.clear()
            entries.update(before)
        for model in self.models:
            compat.forget_gradients(model)
        for parameter, grad in self._grads:
            parameter.grad = None if grad is None else grad.zero_()
        for tensor, value in [*self._tensors, *self._gradients]:
            tensor.copy_(value)


def _copies(tensors: list[torch.Tensor]) -> _Copies:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


RANDOM = 'random states'


@dataclass(frozen=True)
class Verdict:
    """The ranks' verdict on an iteration that had begun before its call."""

    changed: int | None  # the first rank that has found a change; None: nobody has
    prefilled: bool  # whether gradients of some rank were not zero when the iteration began


@dataclass(frozen=True)
class Agreement:
    """A question to all ranks; its answer is there when the iteration ends at the latest."""

    entry: EntryState  # what the iteration of this rank began with
    watch: Watch | None  # its weights; None: no forward of it had run ahead
    changes: list[str]  # what it has found
    _flags: torch.Tensor
    _work: Any
    _copy: torch.Tensor

    @classmethod
    def begin(
        cls, entry: EntryState, watch: Watch | None, changes: list[str], device: torch.device
    ) -> Agreement:
        """Ask whether a rank has found changes: a collective that nobody waits for here."""
        rank, size = dist.get_rank(), dist.get_world_size()
        found = [rank if changes else size, size - entry.prefilled]
        flags = torch.empty(2, dtype=torch.int64, device=device)
        for flag, value in zip(flags, found, strict=True):
            flag.fill_(value)  # by a kernel: a copy from the host waits for forwards that run ahead
        differ = None if watch is None or changes else watch.differ()
        if differ is not None:  # on its device: the host does not wait for it
            flags[0] = torch.where(differ, rank, size)
        work: Any = dist.all_reduce(flags, dist.ReduceOp.MIN, async_op=True)
        return cls(entry, watch, changes, flags, work, room_on_host(flags))

    def verdict(self) -> Verdict:
        """Return the verdict of all ranks."""
        changed, prefilled = read_behind(self._work, self._flags, self._copy).tolist()
        size = dist.get_world_size()
        return Verdict(None if changed == size else changed, prefilled < size)

    def found(self) -> str:
        """Return the changes that this rank has found, in words."""
        different = [] if self.watch is None else self.watch.different()
        return summary([*self.changes, *different])


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
        return self._steps < FIRST or bool(every and self._steps % every == 0)

    def begin(self, batch: Batch) -> None:
        """Take note of the weights that forwards of this batch have run ahead with."""
        stages = {p.stage for p in batch.executor.record.passes}
        held = batch.lowered.placement.stages(batch.pipeline.rank())
        chunks = zip(held, batch.call.arguments.models, strict=True)
        models = [model for stage, model in chunks if stage in stages]
        self._watch = None
        if not models:
            return  # it has only received
        self._watch = Watch(self._found(models, self._hashes), self._hashes, unseen_by_autograd)

    def _found(self, models: list[torch.nn.Module], anew: bool) -> Watched:
        """Return their parameters: looked for now and then, since that takes longer than all."""
        if anew or self._watched is None or self._watched[0] != models:
            self._watched = models, watched_of(models)
        return self._watched[1]

    def ask(self, models: list[torch.nn.Module], effects: SideEffects | None) -> Agreement:
        """Ask whether some rank has found a change; all ranks do, when the iteration is called for.

        `effects` are those of forwards that ran ahead, not committed; None: none did.
        """
        watch, self._watch = self._watch if effects is not None else None, None  # or stale
        changes = [] if watch is None else watch.changes()
        if effects is not None and effects.drawn_since():
            changes.append(RANDOM)
        entry = EntryState.of(models, look=self._hashes)
        self._steps += 1
        device = next(models[0].parameters()).device
        agreement = Agreement.begin(entry, watch, changes, device)
        if watch is not None:
            watch.hide()
        return agreement

    def stands(self, agreement: Agreement) -> bool:
        """Return whether no rank has found a change; else set this rank back to the beginning."""
        with self._session.watchdog.collective('whether weights changed after the optimizer step'):
            verdict = agreement.verdict()
        post_validation = self._session.post_validation
        assert post_validation is not None
        stands = verdict.changed is None
        if not stands:
            agreement.entry.restore()
            if verdict.changed == dist.get_rank():
                _say(agreement.found())
        post_validation.after_iteration(not stands, verdict.prefilled)
        return stands


def _say(found: str) -> None:
    rank_log.warning(
        f'rank {dist.get_rank()}: {found} changed between optimizer.step() and the '
        'next iteration: the forwards that had run ahead were dropped, and the iteration was run '
        'again on the weights as they are, which costs the time of an iteration'
    )
