"""Watches what forwards have run ahead with, until their iteration is called for and has ended."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_zbpp.mcore.iteration.batch import Batch
from megatron_zbpp.mcore.post_validation.agreement import RANDOM, Agreement
from megatron_zbpp.mcore.post_validation.entry_state import EntryState
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.side_effects import FIRST, SideEffects, watched_of
from megatron_zbpp.post_validation.watch import Watch, Watched
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.log import rank_log


class Watching:
    """Notices, on one rank, what the program changes; finds out whether another rank has.

    Args:
        session: of the iterations.
    """

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
        """Return whether nobody has found a change; else set this rank back to the beginning."""
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
    """Tell the user: on the first rank that knows what it was."""
    rank_log.warning(
        f'rank {dist.get_rank()}: {found} changed between optimizer.step() and the '
        'next iteration: the forwards that had run ahead were dropped, and the iteration was run '
        'again on the weights as they are, which costs the time of an iteration'
    )
