"""Pipeline schedules for unmodified Megatron-Core.

>>> import megatron_zbpp
>>> schedule = megatron_zbpp.build('zb-h1', num_ranks=2, num_microbatches=2)
>>> ' '.join(map(str, schedule.passes[1]))
'1F0 1B0 1F1 1B1 1W0 1W1'

In a program that trains, before the model is built:

    plugin = megatron_zbpp.enable('zb-v')
    ...
    plugin.disable()

What is listed in `__all__` stays as it is from release to release. What needs torch or Megatron
imports it when it is called: schedules are built, checked, simulated and planned without.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zbpp.mcore import enabled
from megatron_zbpp.version import __version__

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_zbpp.analysis.checker import check
    from megatron_zbpp.analysis.simulator import simulate
    from megatron_zbpp.ir import Pass, Placement, Schedule
    from megatron_zbpp.ir.costs import Costs
    from megatron_zbpp.ir.errors import ScheduleError
    from megatron_zbpp.ir.formats import load
    from megatron_zbpp.ir.layout import ModelLayout
    from megatron_zbpp.mcore.iteration.observe import Observer
    from megatron_zbpp.mcore.plugin import Plugin
    from megatron_zbpp.partitioning.devices import Device, Devices
    from megatron_zbpp.partitioning.layers import Layer, Layers
    from megatron_zbpp.partitioning.plans import PartitionPlan, partition
    from megatron_zbpp.planner.plans import plan
    from megatron_zbpp.runtime.observe.measure import Figures
    from megatron_zbpp.schedules import Family, build

__all__ = [
    'Costs',
    'Device',
    'Devices',
    'Family',
    'Layer',
    'Layers',
    'ModelLayout',
    'PartitionPlan',
    'Pass',
    'Placement',
    'Schedule',
    'ScheduleError',
    '__version__',
    'add_arguments',
    'build',
    'check',
    'device',
    'enable',
    'families',
    'figures',
    'guard',
    'layout_for',
    'load',
    'observe',
    'partition',
    'plan',
    'simulate',
]

# Modules that are imported when one of their names is first read: a training that plans nothing
# imports no planner. The names are those under TYPE_CHECKING above.
_MODULES = {
    'analysis.checker': ('check',),
    'analysis.simulator': ('simulate',),
    'ir': ('Pass', 'Placement', 'Schedule'),
    'ir.costs': ('Costs',),
    'ir.errors': ('ScheduleError',),
    'ir.formats': ('load',),
    'ir.layout': ('ModelLayout',),
    'partitioning.devices': ('Device', 'Devices'),
    'partitioning.layers': ('Layer', 'Layers'),
    'partitioning.plans': ('PartitionPlan', 'partition'),
    'planner.plans': ('plan',),
    'schedules': ('Family', 'build'),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    """Return a public name from its module, which is imported now."""
    if name not in _MODULE_OF:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'{__name__}.{_MODULE_OF[name]}'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names, imported or not."""
    return sorted({*globals(), *__all__})


def enable(
    schedule: str | Schedule = 'zb-h1',
    num_chunks: int | None = None,
    *,
    memory_limit: float | None = None,
    watchdog_timeout: float | None = None,
    watchdog_pause_timeout: float | None = None,
    post_validation: bool | int = False,
    profile_iters: int = 5,
    trace_dir: str | Path | None = None,
    offload: str | int | None = None,
    freeze: str | Path | None = None,
    recompute: str | int | None = None,
    kept_gib: float | None = None,
    check_interval: int = 10,
    message_ctas: int = 2,
    message_priority: str = 'high',
    message_receives: str = 'late',
    flags: Mapping[str, object] | None = None,
) -> Plugin:
    """Make Megatron-Core's pipelined forward_backward functions run `schedule`.

    Calling it again with equal arguments changes nothing; with others it switches. The default is
    the best schedule for which a model of one chunk a rank need not change; with two chunks a rank
    'zb-v' is better.

    Args:
        schedule: a name or alias of a schedule (`zbpp list` prints them), or a schedule itself; or
            'auto': measures a few iterations and switches to a schedule that is planned for them.
        num_chunks: stages a rank, for schedules that leave the choice.
        memory_limit: in activations of one microbatch on a full rank, for schedules that take one.
        watchdog_timeout: seconds after which a rank whose pipeline no longer moves reports where it
            stands and exits; None or 0: never. Choose several times what an iteration takes.
        watchdog_pause_timeout: the same between iterations, in checkpoints, say; None: ten times
            as long, and 600 at least.
        post_validation: whether optimizer steps are taken before all ranks have agreed to them, and
            validated later, once 10 in a row were neither clipped nor skipped; or how many of them.
        profile_iters: iterations that 'auto' measures before it plans, of schedule or offload.
        trace_dir: where to draw an iteration of the first pipeline as a page, and for Perfetto.
        offload: of which chunks of each rank activations are on the host between forward and
            backward: 'half' (those that wait longest), 'all', or how many; or 'auto': all of them
            while `profile_iters` iterations are measured, then what costs no time. Losses stay the
            same.
        freeze: the file of `zbpp freeze -o`: weight gradients that it names are left out, step by
            step. This trains another model than without; see the page on unbalanced pipelines.
        recompute: of which chunks of each rank forwards keep their input only, and run again before
            their backward, in passes that the schedule places; as `offload`, for which then
            chunks are left that do not run again.
        kept_gib: most GiB of old parameters and optimizer state that a step which is validated
            later keeps on the GPU; what is not kept is stepped twice. None: what there is memory
            for.
        message_ctas: most thread blocks of NCCL's kernels for a message between stages. Fewer leave
            more of the GPU to passes that run meanwhile, more make large messages faster.
        message_priority: of these kernels: 'high', so that a message does not wait for kernels of
            the next pass that are queued with it; or 'group', that of the pipeline's group.
        message_receives: when receives are posted: 'early', before the pass during which the
            message comes; 'late', as late as it costs nothing, so that few of NCCL's kernels spin
            beside passes; or 'latest', so that hardly any does, where messages are short.
        check_interval: behind how many early steps values of weights are compared with those that
            the next iteration has begun with, beyond the first ten; 0: never. Writes that torch
            counts are seen each time.
        flags: of the program, by name: all ranks must have them alike, but for paths and their own
            numbers, or they stop before they train.

    Returns:
        The plugin: its `num_chunks` says how many chunks of the model each rank builds; `disable()`
        undoes everything, as does leaving its `with` block.

    Raises:
        ValueError: no such schedule, the message names the known ones; or another argument that
            makes no sense.
        OSError: the file of `freeze` cannot be read.
    """
    from megatron_zbpp.mcore.settings import Settings, folder, freezing

    if flags is not None and not isinstance(flags, Mapping):
        raise ValueError(f'flags is {flags!r}: give names with values, such as vars(args)')
    settings = Settings(
        schedule,
        num_chunks,
        memory_limit,
        watchdog_timeout,
        watchdog_pause_timeout,
        post_validation,
        profile_iters,
        folder(trace_dir),
        offload,
        freezing(freeze),
        recompute,
        kept_gib,
        check_interval,
        message_ctas,
        message_priority,
        message_receives,
    )
    return enabled.switch(settings, flags)


def layout_for(
    schedule: str | Schedule | Placement,
    num_ranks: int,
    num_layers: int,
    *,
    num_chunks: int | None = None,
    num_microbatches: int | None = None,
    embedding: bool = False,
    loss: bool = False,
    mtp_num_layers: int = 0,
) -> ModelLayout:
    """Return which rank builds which layers.

    Args:
        schedule: as for `enable`; or a placement: `Placement.loop(p)` is Megatron's own.
        num_ranks: p.
        num_layers: of the model.
        num_chunks: as for `enable`.
        num_microbatches: m; where it is given, the schedule of so many is checked.
        embedding: whether the embedding counts as a layer, so that its stage gets one fewer.
        loss: the same for the output layer and loss.
        mtp_num_layers: layers of multi-token prediction, on the last stage; each counts as one.

    Raises:
        ScheduleError: the schedule is not valid.
        ValueError: no such schedule, or too few layers for so many stages.
    """
    from megatron_zbpp.ir import Placement
    from megatron_zbpp.ir.layout import ModelLayout, layers_per_stage
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    if isinstance(schedule, Placement):
        placement = schedule
    else:
        programs = Programs(Settings(schedule, num_chunks))
        placement = programs.placement(num_ranks)
        if num_microbatches is not None:
            programs.lowered(num_ranks, num_microbatches, forward_only=False)
    layers = layers_per_stage(num_layers, placement, embedding, loss + mtp_num_layers)
    return ModelLayout(placement, tuple(layers), mtp_num_layers)


def families() -> tuple[Family, ...]:
    """Return all families of schedules, as `zbpp list` prints them."""
    from megatron_zbpp.schedules import FAMILIES

    return FAMILIES


def device() -> torch.device:
    """Return where to train: this process's GPU; or the CPU, made ready, where there is none.

    Raises:
        RuntimeError: the CPU was to be made ready, but megatron.core had been imported before.
    """
    from megatron_zbpp.emulation import cpu

    return cpu.device()


def guard(what: str) -> AbstractContextManager[None]:
    """Watch a collective call of the program's own, as the watchdog watches the plugin's.

    Args:
        what: its name, for the report of a rank that waits in it.
    """
    plugin = enabled.plugin
    return nullcontext() if plugin is None else plugin.session.watchdog.collective(what)


def observe(device: torch.device, pp_group: dist.ProcessGroup) -> AbstractContextManager[Observer]:
    """Measure the passes of Megatron's own 1F1B as the plugin measures those of its schedules.

    Args:
        device: that this process computes on.
        pp_group: the ranks of its pipeline.

    Returns:
        An observer: its `latest` is the latest iteration, as the plugin's is.
    """
    from megatron_zbpp.mcore.iteration.observe import observe

    return observe(device, pp_group)


def figures() -> Figures | None:
    """Return bubble, idle time and memory since this was last asked: a collective of the pipeline.

    Bubble and idle time are means of all iterations since, memory is the most that any rank held.
    None where no iteration of training has ended since.
    """
    return None if enabled.plugin is None else enabled.plugin.figures()


def add_arguments() -> None:
    """Add our flags to the command line of `megatron.training`, now or once it is imported.

    For a script of Megatron-LM: two lines at its top make it what `megatron_zbpp.launch` makes it.
    """
    from megatron_zbpp.runtime.import_hook import after_import

    def install(_: object) -> None:
        from megatron_zbpp.mcore.command_line import arguments

        arguments.install()

    name = 'megatron.training.arguments'
    if name in sys.modules:
        install(None)
    else:
        after_import({name: install})
