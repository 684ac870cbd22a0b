"""One global batch: the executor of its passes on this rank, and Megatron's work after them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core import utils
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_zbpp.guests.base import Around
from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.model_checks import every_weight_gradient
from megatron_zbpp.mcore.iteration.stages import Arguments, Call, ModelStage
from megatron_zbpp.mcore.layers.linear import dropped_gradient
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.model_settings import OFFLOADING
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime import clock
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.compat import profiler_enabled
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.tables import Tables


def profiled(p: Pass) -> AbstractContextManager:
    """Make a range as `runtime.clock.profiled` does, and under nsys.

    There, a program may have asked for Megatron's ranges by `configure_nvtx_profiling`, without
    torch's emit_nvtx.
    """
    nsys = compat.nvtx_enabled() and not profiler_enabled()
    return _nvtx(clock.name(p)) if nsys else clock.profiled(p)


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
    pipeline: dist.ProcessGroup  # the group of their ranks
    context: CallContext  # of the call
    faces: Sequence[Face]  # of the techniques at work in the call, the innermost first
    wraps: Mapping[str, Wrap]  # make the wrappers of stages, the innermost first
    # what a stage sends to the next one, where edges differ; none: `messages`
    edges: Mapping[int, tuple[Message, ...]] = field(default_factory=dict)

    def executor(
        self, call: Call, data: Data, tables: Tables, nobody: Channels | None = None
    ) -> Executor:
        """Return the executor of a call on all ranks.

        With `nobody` for its channels this rank runs passes alone, and activations stay.
        """
        session, lowered, messages = self.session, self.context.lowered, self.context.messages
        placement, models = lowered.placement, call.arguments.models
        held = placement.stages(self.pipeline.rank())
        several, last = len(held) > 1, placement.num_stages - 1
        stages = {
            stage: ModelStage(
                call, models[k], data[k], k if several else None, stage == last, self.wraps
            )
            for k, stage in enumerate(held)
        }
        more: dict[str, Any] = {}
        channels = nobody
        if channels is None:
            varying = messages[0].shape is None
            channels = session.channels(self.pipeline, placement, call.device, varying)
            more['together'] = next(filter(None, (face.together for face in self.faces)), None)
            if not call.arguments.forward_only:
                more['side'] = session.filler
                if lowered.moves:
                    store = session.activations(call.device, self.pipeline, lowered.partners)
                    store.tell(everything=dist.get_rank() == 0)
                    parameters = (p for model in models for p in model.parameters())
                    held_by = (each for s in stages.values() for each in s.wrappers.values())
                    store.keep(parameters, [wrapper.shared for wrapper in held_by])
                    more['activations'] = store
        own = [face.passes([*stages.values()], self.context) for face in self.faces]
        collectives = {name: each for o in own for name, each in o.collectives.items()}
        if collectives:
            more['collectives'] = session.collectives(self.pipeline, collectives)
        named: Around = profiled
        for guest in session.guests:
            named = guest.within(named, call, self.pipeline)
        return Executor(
            tables.program,
            stages,
            channels,
            messages if len(messages) > 1 else messages[0],
            session.store,
            clock_for(call.device, counting=session.counting),
            named,
            tables=tables,
            edges=self.edges,
            actions={kind: run for each in own for kind, run in each.actions.items()},
            **more,
        )


@dataclass(frozen=True)
class Batch:
    """One global batch of one module, ready to run on this rank."""

    groups: ProcessGroupCollection
    pipeline: dist.ProcessGroup
    config: Any
    call: Call
    lowered: Lowered
    executor: Executor

    def run(self, session: Session) -> None:
        """Run the passes that are left of it."""
        arguments = self.call.arguments
        looked_at = arguments.models if self.executor.splits else ()
        for guest in () if arguments.forward_only else session.guests:
            # steps that NVIDIA's loop has taken by now; None: another loop trains
            guest.before(getattr(compat.training_arguments(), 'curr_iteration', None))
            if guest.skips_gradients:
                looked_at = ()  # some get none
        if session.store.left_out is not None and not arguments.forward_only:
            configs = (getattr(model, 'ddp_config', None) for model in arguments.models)
            # DDP's hooks fail then where a parameter has no gradient
            wanted = any(getattr(config, 'overlap_grad_reduce', False) for config in configs)
            session.store.dropped = dropped_gradient if wanted else None
        with (
            session.watchdog.passes(self.executor),
            every_weight_gradient(looked_at, session.store),
        ):
            self._gather_parameters()
            self.executor.run()

    def finish(self, session: Session) -> list[Any]:
        """Do what comes after the passes; return the loss function's results on the last rank."""
        config, arguments = self.config, self.call.arguments
        for face in session.faces:
            face.ended(self.lowered.placement, self.pipeline)
        if getattr(config, OFFLOADING, False):  # which forgets the iteration, as by its schedules
            # before training, it would take what an evaluation has told it for the order of that
            offloading = schedules.off_interface
            (offloading.reset if session.announced else offloading.reset_instance)()
        if config.finalize_model_grads_func is not None and not arguments.forward_only:
            tokens = self.call.num_tokens if config.calculate_per_token_loss else None
            more = {'pg_collection': self.groups, 'force_all_reduce': arguments.force_all_reduce}
            with session.collective('reduction of gradients among replicas and tied layers'):
                config.finalize_model_grads_func(arguments.models, tokens, **more)
        if getattr(config, 'cuda_graph_impl', None) == 'local':
            schedules.create_cudagraphs()  # in the order of the first iteration; later it does none
        record, clock = self.executor.record, self.executor.clock
        iteration = Iteration(self.lowered.schedule, self.pipeline, record, clock)
        if arguments.forward_only:
            session.latest = iteration
        else:
            early = session.post_validation
            if session.filler is not None and not (early is not None and early.policy.engaged):
                session.filler.at_end()
            session.on_iteration_end(iteration)
        return self.call.results

    def _gather_parameters(self) -> None:
        """Ask ranks for parameters before forwards, as Megatron's interleaved schedule does."""
        starts, models = self.config.param_sync_func, self.call.arguments.models
        if starts is None or self.call.arguments.forward_only or len(models) == 1:
            return
        begun = {p.stage for p in self.executor.record.passes}
        for chunk, stage in enumerate(self.lowered.placement.stages(self.pipeline.rank())):
            if stage not in begun:
                start = starts[chunk] if isinstance(starts, list | tuple) else starts
                start(models[chunk].parameters())


class NextIteration:
    """The iteration that Megatron asks for next; of this one no forward runs before its call."""

    def settle(self, clean: bool) -> None:
        """Keep the forwards that have run for the next call, or drop them."""

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        """Return the iterator that replaces `iterator`: first data that was read and not used."""
        return iterator

    def take(self, arguments: Arguments) -> Batch | None:
        """Return the batch that was begun for this call; None: there is none."""

    def stands(self) -> bool:
        """Return True, on all ranks, if passes that have ended count; else all is set back."""
        return True

    def drop(self) -> None:
        """Drop forwards of later batches, on all ranks; their data is given again."""

    def close(self) -> None:
        """Drop what was begun, on all ranks: nothing is trained from now on."""
