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
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from megatron_zbpp.version import __version__

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from megatron_zbpp.analysis.checker import check
    from megatron_zbpp.analysis.simulator import simulate
    from megatron_zbpp.guests.side_work import forwards
    from megatron_zbpp.ir import Pass, Placement, Schedule
    from megatron_zbpp.ir.costs import Costs
    from megatron_zbpp.ir.formats import load
    from megatron_zbpp.ir.placement import ModelLayout
    from megatron_zbpp.ir.schedule import ScheduleError
    from megatron_zbpp.mcore.enabled import enable
    from megatron_zbpp.mcore.iteration.observe import Observer
    from megatron_zbpp.mcore.training_log import Summary
    from megatron_zbpp.partitioning.layers import Device, Devices, Layer, Layers
    from megatron_zbpp.partitioning.plans import PartitionPlan, partition
    from megatron_zbpp.planner.figures import compare
    from megatron_zbpp.planning import frontier, plan
    from megatron_zbpp.render.drawing import draw
    from megatron_zbpp.runtime.measure import Figures
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
    'compare',
    'data_parallel_rank',
    'device',
    'draw',
    'enable',
    'families',
    'figures',
    'forwards',
    'frontier',
    'guard',
    'layout_for',
    'load',
    'observe',
    'partition',
    'plan',
    'simulate',
    'summary',
]

# Modules that are imported when one of their names is first read: those under TYPE_CHECKING.
_MODULES = {
    'analysis.checker': ('check',),
    'analysis.simulator': ('simulate',),
    'guests.side_work': ('forwards',),
    'ir': ('Pass', 'Placement', 'Schedule'),
    'ir.costs': ('Costs',),
    'ir.schedule': ('ScheduleError',),
    'ir.formats': ('load',),
    'ir.placement': ('ModelLayout',),
    'mcore.enabled': ('enable',),
    'partitioning.layers': ('Device', 'Devices', 'Layer', 'Layers'),
    'partitioning.plans': ('PartitionPlan', 'partition'),
    'planner.figures': ('compare',),
    'planning': ('frontier', 'plan'),
    'render.drawing': ('draw',),
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
    from megatron_zbpp.ir import Placement, strict_json
    from megatron_zbpp.ir.placement import ModelLayout, layers_per_stage
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    strict_json.require_whole(num_ranks=num_ranks, num_layers=num_layers)
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
    from megatron_zbpp.mcore.enabled import plugin

    return nullcontext() if plugin is None else plugin.session.watchdog.collective(what)


def data_parallel_rank(vp_stage: int | None = None) -> int:
    """Return the data-parallel rank whose data a chunk of the model reads on this rank.

    That is this rank's own, but for two-way schedules, where a microbatch goes on in another
    replica: so a training loop that reads data by chunk works with every schedule.

    Args:
        vp_stage: index of the chunk among those of this rank; None: there is one.
    """
    from megatron.core import parallel_state

    from megatron_zbpp.mcore.enabled import plugin

    if plugin is None:
        return parallel_state.get_data_parallel_rank()
    return plugin.data_parallel_rank(vp_stage or 0)


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
    from megatron_zbpp.mcore.enabled import plugin

    return None if plugin is None else plugin.figures()


def summary() -> Summary | None:
    """Return a summary of the training so far, as one line: a collective of the pipeline.

    Idle time as the mean of all iterations (of the last 1000, where nobody asked for figures), the
    gain over 1F1B as simulated with the times that the latest iteration took, and early steps.
    NVIDIA's loop prints it at its end; all ranks of a loop of one's own ask for it. None where no
    iteration of training has ended.
    """
    from megatron_zbpp.mcore.enabled import plugin

    if plugin is None:
        return None
    from megatron_zbpp.mcore.training_log import summarise

    return summarise(plugin.session)


def add_arguments() -> None:
    """Add our flags to the command line of `megatron.training`, now or once it is imported.

    For a script of Megatron-LM: two lines at its top make it what `megatron_zbpp.launch` makes it.
    """
    from megatron_zbpp.runtime.import_hook import after_import

    def install(_: object) -> None:
        from megatron_zbpp.launch import flags

        flags.install()

    name = 'megatron.training.arguments'
    if name in sys.modules:
        install(None)
    else:
        after_import({name: install})
