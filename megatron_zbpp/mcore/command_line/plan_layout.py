"""The layout of layers that a plan's file brings beside the schedule, from `zbpp partition`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.formats import PlanFile, load_plan
from megatron_zbpp.mcore import layout, model_settings, preflight
from megatron_zbpp.mcore.command_line import flags, sizes
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.problems import Checks
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.log import job_log


def settings_of(
    args: argparse.Namespace, given: Mapping[str, Any], machine: Mapping[str, bool]
) -> tuple[Settings, str | None]:
    """Return the settings of the flags; write the layout of their plan into Megatron's arguments.

    Args:
        args: Megatron's arguments.
        given: the values of our flags.
        machine: what the job runs on, as of `preflight.machine`.

    Returns:
        The settings, and the plan's layout: None where there is no file, or no layout in it.

    Raises:
        ValueError: both a name and a file, the layout is of another model, the arguments have
            another one, or Megatron's selective recomputation is off, which the plan counts on.
            Wrong values are told with what the schedule refuses of Megatron's settings.
        OSError: a file cannot be read.
    """
    file, source = given['pipeline_schedule_file'], _source(given)
    if not isinstance(source, PlanFile):
        return _settings(args, given, source, machine), None
    if source.selective and getattr(args, 'recompute_granularity', None) != 'selective':
        raise ValueError(
            f"{file} was planned with Megatron's selective recomputation, without which it holds "
            'more: give --recompute-granularity selective, or plan without --actions selective'
        )
    if source.lacks:
        job_log.warning(f'{file}: {source.lacks}')
    if source.layout is not None:
        _take_layout(args, source.layout, file)
    schedule = source.schedule
    return _settings(args, given, schedule, machine), source.layout


def require_values(given: Mapping[str, Any]) -> None:
    """Check the values of our flags, whatever Megatron's are.

    Raises:
        ValueError: one cannot, with the cure.
        OSError: a file cannot be read.
    """
    source = _source(given)
    named = source.schedule if isinstance(source, PlanFile) else source
    flags.settings_of(given, named, None)


def _source(given: Mapping[str, Any]) -> str | PlanFile:
    """Return the name of the schedule, or the plan; raise as `settings_of`."""
    name, file = given['pipeline_schedule'], given['pipeline_schedule_file']
    if file is None:
        return name
    if name is not None:
        raise ValueError(
            f'--pipeline-schedule {name} and --pipeline-schedule-file {file}: give one of them'
        )
    return load_plan(Path(file))


def require_supported(
    args: argparse.Namespace, programs: Programs, machine: Mapping[str, bool]
) -> None:
    """Check that no argument of Megatron is unsupported; raise one error that names all."""
    reasons = preflight.refused(args, programs, args.pipeline_model_parallel_size, **machine)
    if reasons:
        raise NotImplementedError('with --pipeline-schedule, ' + '. '.join(map(str, reasons)))


def _take_layout(args: argparse.Namespace, text: str, file: str) -> None:
    """Write the layout of a plan into Megatron's arguments."""
    hybrid = model_settings.hybrid(args)
    if hybrid is not None and isinstance(getattr(args, hybrid), str):
        _take_pattern(args, hybrid, text, file)
    else:
        _take_layers(args, text, file)


def _settings(
    args: argparse.Namespace,
    given: Mapping[str, Any],
    source: str | Schedule,
    machine: Mapping[str, bool],
) -> Settings:
    """Return the settings; raise ValueError for chunks and all values that cannot be, together."""
    checks, chunks, made = Checks(), None, None
    with checks.one():
        chunks = _num_chunks(args, source)
    with checks.one():
        made = flags.settings_of(given, source, chunks)
    if checks.failed and (plain := _plain(source, chunks)) is not None:
        with checks.one():
            tuple(preflight.take_back(args, plain.splits(args.pipeline_model_parallel_size)))
            require_supported(args, plain, machine)
    checks.require_all()
    assert made is not None
    return made


def _plain(source: str | Schedule, num_chunks: int | None) -> Programs | None:
    """Return the programs by all defaults but the schedule; None: no such schedule."""
    try:
        return Programs(Settings(source, num_chunks))
    except (OSError, ValueError):
        return None


def _num_chunks(args: argparse.Namespace, source: str | Schedule) -> int | None:
    """Return chunks a rank that the arguments ask for; None: the schedule has its own."""
    if not isinstance(source, Schedule):
        return sizes.chunks_for(args, source)
    asked = sizes.num_chunks(args)
    if asked not in (None, source.placement.num_chunks):
        raise ValueError(
            f'the arguments ask for {asked} chunks on each rank, but the schedule {source.name} of '
            f'--pipeline-schedule-file has {source.placement.num_chunks}: give as many stages in '
            '--pipeline-model-parallel-layout, or leave such flags out'
        )
    return None


def _take_layers(args: argparse.Namespace, text: str, file: str) -> None:
    """Write the layout of a model of decoder layers, if it is one of this model's."""
    for name, letter in (('num_layers', 't'), ('mtp_num_layers', 'm')):
        wanted, has = getattr(args, name, None) or 0, text.count(letter)
        if wanted != has:
            raise ValueError(
                f'{flag(name)} {wanted}, but the layout {text} of {file} has {has}: partition the '
                'layers of this model (zbpp partition), or take the schedule without its layout'
            )
    if not (text.startswith('E') and text.endswith('L') and set(text) <= set('EtmL|')):
        raise ValueError(
            f'the layout {text} of {file} is none of E, t, m, L and |, with E first and L last: '
            'name the layers so in the file of layers'
        )
    given = args.pipeline_model_parallel_layout
    if given is not None and _parsed(given) != _parsed(text):
        raise ValueError(
            f'--pipeline-model-parallel-layout {given}, but {file} was planned for {text}: leave '
            'the flag out'
        )
    args.pipeline_model_parallel_layout = text


def _take_pattern(args: argparse.Namespace, name: str, text: str, file: str) -> None:
    """Divide a hybrid model's pattern as the layout says, embedding and loss left out."""
    main, slash, rest = getattr(args, name).partition('/')
    segments = text.removeprefix('E').removesuffix('L')
    if segments.replace('|', '') != main.replace('|', ''):
        raise ValueError(
            f'{flag(name)} {main}, but the layout {text} of {file} has other layers: partition the '
            'layers of this model (zbpp partition)'
        )
    setattr(args, name, segments + slash + rest)


def _parsed(text: str) -> list:
    return layout.StageLayout.parse_str_to_list(text)
