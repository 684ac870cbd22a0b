"""Make what runs the passes of a call on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import utils

from megatron_zbpp.guests.base import Around
from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import Call, ModelStage
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime import clock
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.compat import profiler_enabled
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.tables import Tables

if TYPE_CHECKING:
    from megatron_zbpp.runtime.activations.store import ActivationStore


def profiled(p: Pass) -> AbstractContextManager:
    """Make a range as `runtime.clock.profiled` does, and under nsys.

    There, a program may have asked for Megatron's ranges by `configure_nvtx_profiling`, without
    torch's emit_nvtx.
    """
    if compat.nvtx_enabled() and not profiler_enabled():
        return _nvtx(clock.name(p))
    return clock.profiled(p)


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    utils.nvtx_range_push(name)
    yield
    utils.nvtx_range_pop(name)  # not after an error: ranges inside are open, and it would hide that


Data = Sequence[Iterator | None]
"""What the chunks of a rank read."""


@dataclass(frozen=True)
class Executors:
    """Makes executors of the programs that the ranks have agreed upon."""

    session: Session  # whose schedule it is
    pipeline: torch.distributed.ProcessGroup  # the group of their ranks
    context: CallContext  # of the call
    faces: Sequence[Face]  # of the techniques at work in the call, the innermost first
    wraps: Mapping[str, Wrap]  # make the wrappers of stages, the innermost first
    # what a stage sends to the next one, where edges differ; none: `messages`
    edges: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)

    @property
    def lowered(self) -> Lowered:
        """The programs of all ranks."""
        return self.context.lowered

    @property
    def messages(self) -> Sequence[Message]:
        """Messages between neighbours, by part of a sequence."""
        return self.context.messages

    def executor(self, call: Call, data: Data, tables: Tables) -> Executor:
        """Return the executor of a call on all ranks."""
        session, lowered, training = self.session, self.lowered, not call.arguments.forward_only
        stages = self._stages(call, data)
        varying = self.messages[0].shape is None
        return self._made(
            stages,
            tables,
            session.channels(self.pipeline, lowered.placement, call.device, varying),
            activations=_activations(session, lowered, call, self.pipeline, stages.values()),
            side=session.filler if training else None,
            together=next((f.together for f in self.faces if f.together is not None), None),
        )

    def alone(self, call: Call, data: Data, tables: Tables, nobody: Channels) -> Executor:
        """Return the executor of passes that this rank runs alone, activations where they are."""
        return self._made(self._stages(call, data), tables, nobody)

    def _made(
        self, stages: dict[int, ModelStage], tables: Tables, channels: Channels, **more: Any
    ) -> Executor:
        session, messages = self.session, self.messages
        own = [face.passes([*stages.values()], self.context) for face in self.faces]
        more['actions'] = {kind: run for each in own for kind, run in each.actions.items()}
        collectives = {name: each for o in own for name, each in o.collectives.items()}
        if collectives:
            more['collectives'] = session.collectives(self.pipeline, collectives)
        call = next(iter(stages.values())).call
        named: Around = profiled
        for guest in session.guests:
            named = guest.within(named, call, self.pipeline)
        kind: Callable[..., Executor] = Executor
        if self.edges:
            from megatron_zbpp.runtime.hops import HopExecutor

            kind = partial(HopExecutor, self.edges)
        return kind(
            tables.program,
            stages,
            channels,
            messages if len(messages) > 1 else messages[0],
            session.store,
            clock_for(call.device, counting=session.counting),
            named,
            tables=tables,
            **more,
        )

    def _stages(self, call: Call, data: Data) -> dict[int, ModelStage]:
        """Return the stages of this rank by number."""
        placement, models = self.lowered.placement, call.arguments.models
        held = placement.stages(self.pipeline.rank())
        return {
            stage: ModelStage(
                call,
                models[chunk],
                data[chunk],
                chunk if len(held) > 1 else None,
                stage == placement.num_stages - 1,
                self.wraps,
            )
            for chunk, stage in enumerate(held)
        }


def _activations(
    session: Session,
    lowered: Lowered,
    call: Call,
    pp_group: torch.distributed.ProcessGroup,
    stages: Iterable[ModelStage],
) -> ActivationStore | None:
    if call.arguments.forward_only or not lowered.moves:
        return None
    store = session.activations(call.device, pp_group, lowered.partners)
    store.tell(everything=torch.distributed.get_rank() == 0)
    parameters = (p for model in call.arguments.models for p in model.parameters())
    store.keep(parameters, [each.shared for stage in stages for each in stage.wrappers.values()])
    return store
