"""Our flags in Megatron's own command line.

They are added to NVIDIA's parser from inside, and what they ask for is prepared right after
parsing, before Megatron looks at its arguments: the schedule is built and checked, what does not
work with it is refused, the layers are laid out for its placement, and the plugin is enabled.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST
from megatron_zbpp.mcore import enabled, model_settings, preflight, replicas
from megatron_zbpp.mcore.command_line import flags, parsing, plan_layout, sizes
from megatron_zbpp.mcore.command_line.layer_memory import layer_memory
from megatron_zbpp.mcore.command_line.messages import refuse
from megatron_zbpp.mcore.command_line.naming import by_flags, renaming
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.problems import lines_of
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.runtime.activations import host_memory
from megatron_zbpp.runtime.log import job_log

_SURE = 0.9  # of what is reckoned: that much leaves, whatever small tensors stay


def require_host_memory(
    args: Namespace, schedule: Schedule, environment: Mapping[str, str]
) -> None:
    """Return unless activations of all ranks of this node cannot be on the host.

    Args:
        args: Megatron's, not validated.
        schedule: in Megatron's ranks.
        environment: of torchrun; without it nothing is known of the node.

    Raises:
        ValueError: more is needed than the host has; with what could be done.
    """
    names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE')
    if not any(on_host(schedule, 1.0)) or any(name not in environment for name in names):
        return
    layer, room = layer_memory(args), host_memory.room()
    if layer is None or room is None:
        return
    rank, local, on_node, size = (int(environment[name]) for name in names)
    held = on_host(schedule, layer.activation * args.num_layers / schedule.num_stages)
    replicas = max(1, size // schedule.num_ranks)  # pipeline ranks are the outermost
    first = rank - local
    needed = sum(held[(each // replicas) % len(held)] for each in range(first, first + on_node))
    if _SURE * needed > room.nbytes:
        raise ValueError(
            f'{schedule.name} needs about {needed / 2**30:.3g} GiB of host memory for the '
            f'{on_node} ranks of this node, which has {room} left: offload fewer chunks, put '
            'fewer of the first pipeline ranks on one node, or give the job more memory'
        )


def on_host(schedule: Schedule, activation: float) -> tuple[float, ...]:
    """Return the most bytes that each rank has on the host.

    Args:
        schedule: any.
        activation: bytes of a microbatch on one stage.
    """
    costs = Costs.uniform(schedule.placement)
    each = (activation,) * schedule.num_stages
    costs = costs.with_amounts(activation=each, retained=each)
    return tuple(max(held, default=0.0) for held in live(schedule, costs, HOST))


_OURS = '_with_our_flags'  # on a function: it adds our flags already
has_run = False  # whether Megatron has read its command line in this process
_PACKAGES = {'yaml': 'pyyaml', 'PIL': 'pillow'}  # of modules with other names


def install() -> None:
    """Add our flags to the command line of `megatron.training`; again does nothing more.

    Raises:
        RuntimeError: it has no command line where we know it, or lacks a package.
    """
    module = 'megatron.training.arguments'
    require_packages(module)
    name, users = 'add_megatron_arguments', (f'{module}:parse_args',)
    patch = Patch(module, name, _with_our_flags, users)
    problem = patch.problem()
    if problem:
        raise RuntimeError(
            f'{problem}: our flags would be unknown; call megatron_zbpp.enable() in the script '
            'instead'
        )
    if not getattr(getattr(patch.find_owner(), name), _OURS, False):
        Registry().install([patch])


def require_packages(module: str) -> None:
    """Check that an optional module of Megatron, if present, can be imported.

    Raises:
        RuntimeError: a package is missing; the message names it.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or 'megatron').partition('.')[0]
        if package != 'megatron':
            raise RuntimeError(
                f'{error}, which {module} imports: pip install {_PACKAGES.get(package, package)}'
            ) from error


def lacks_compiler() -> str:
    """Return why Megatron's loop would not compile its helpers for data; empty: it would, or has.

    Rank 0 runs their Makefile, and so the python3 of the PATH, whichever runs the job.
    """
    if importlib.util.find_spec('megatron.core.datasets.helpers_cpp'):
        return ''
    (folder,) = importlib.import_module('megatron.core.datasets').__path__
    if not Path(folder, 'Makefile').is_file():
        return ''
    asked = 'python3 -m pybind11 --includes'  # as the Makefile does
    if subprocess.run(asked, shell=True, capture_output=True).returncode == 0:
        return ''
    return (
        'python3 has no pybind11, with which Megatron compiles its helpers for data: python3 -m '
        'pip install pybind11'
    )


def _with_our_flags(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        _make_printable(parser)
        flags.add_arguments(parser)
        parser.parse_known_args = _preparing(parser)
        return parser

    setattr(add_megatron_arguments, _OURS, True)
    return add_megatron_arguments


def _make_printable(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of texts that argparse cannot format.

    Megatron-Core 0.18 and later have one, so that their --help ends in a traceback.
    """
    for action in parser._actions:
        text = action.help or ''
        try:
            if '%' in text:
                parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = text.replace('%', '%%')


def _preparing(parser: argparse.ArgumentParser) -> Callable:
    """`parse`, and then `prepare`; a value that makes no sense ends the program with status 2."""
    original = parser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        global has_run
        has_run = True
        try:
            words = sys.argv[1:] if args is None else args
            parsed = parsing.parse(parser, original, words, namespace)
            parsed.checks.require_all()
            prepare(parsed.args)
        except (OSError, ValueError, NotImplementedError) as error:
            told, script = lines_of(error), Path(sys.argv[0]).name
            drawn = len(str(error).splitlines()) > len(told)
            hint = ' (`zbpp check` shows the place)' if drawn else ''
            refuse('\n'.join(f'{script}: error: {what}{hint}' for what in told))
            raise SystemExit(2) from None
        return parsed.args, parsed.unknown

    return parse_known_args


@renaming(by_flags)
def prepare(args: argparse.Namespace) -> Plugin | None:
    """Do what the flags ask for; None where they ask for nothing.

    Args:
        args: Megatron's arguments, not validated yet; the layout of layers is written into them.

    Raises:
        ValueError: a value that cannot work, with the cure.
        NotImplementedError: a combination that is refused, with the cure.
    """
    given = flags.read(args)
    if given is None:
        return None
    if args.pipeline_model_parallel_size == 1:
        plan_layout.require_values(given)
        job_log.warning('one pipeline rank has no pipeline: --pipeline-schedule changes nothing')
        return None
    sizes.require_plain(args)
    stock = sizes.stock_layout(args)  # before a plan writes its own
    machine = preflight.machine()
    settings, layout = plan_layout.settings_of(args, given, machine)
    if settings.same_start and stock is not None:
        settings = replace(settings, same_start=stock)
    notes = [] if layout is None else [f'layers as the plan has them: {layout}']
    ranks, programs = args.pipeline_model_parallel_size, Programs(settings)
    world = int(os.environ.get('WORLD_SIZE', 1))
    replicas.require_pairs(programs, sizes.replicas(args, world))
    placement, splits = programs.placement(ranks), programs.splits(ranks)
    notes += preflight.take_back(args, splits)
    if programs.runs_ahead and sizes.disable_rerun_checks(args, sys.argv):
        notes.append(
            '--rerun-mode disabled, or all ranks would wait for each other in each iteration'
        )
    plan_layout.require_supported(args, programs, machine)
    counts = sizes.microbatches(args, world)
    settings, found = preflight.with_slices(settings, args, ranks, counts)
    notes += [found] if found else []
    before = enabled.plugin  # Megatron's loop parses its arguments twice from 0.19 on
    plugin = enabled.enable(replace(settings, flags=vars(args)))
    for note in notes if plugin is not before else ():
        job_log.info(note)
    plugin.session.programs.join(getattr(args, model_settings.OVERLAP, False))
    for num_microbatches in sorted(counts):
        lowered = plugin.session.programs.lowered(ranks, num_microbatches, forward_only=False)
        require_host_memory(args, lowered.schedule, os.environ)
    sizes.require_every_size(args, world, plugin.session.programs)
    sizes.place_layers(args, placement)
    return plugin
