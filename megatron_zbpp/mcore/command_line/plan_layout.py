"""The layout of layers that a plan's file brings beside the schedule, from `zbpp partition`."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_zbpp.ir import Schedule, formats
from megatron_zbpp.mcore import layout, refusals
from megatron_zbpp.mcore.command_line import flags, sizes
from megatron_zbpp.mcore.command_line.messages import flag


def take_layout(args: argparse.Namespace, config: flags.PipelineScheduleConfig) -> str | None:
    """Return the layout of the plan that is asked for, written into Megatron's arguments.

    Args:
        args: Megatron's arguments.
        config: our flags.

    Returns:
        None where there is no file, or no layout in it.

    Raises:
        ValueError: it is of another model, or the arguments have another layout.
        OSError: the file cannot be read.
    """
    file = config.pipeline_schedule_file
    text = None if file is None else formats.load_layout(file)
    if file is None or text is None:
        return None
    hybrid = refusals.hybrid(args)
    if hybrid is not None and isinstance(getattr(args, hybrid), str):
        _take_pattern(args, hybrid, text, file)
    else:
        _take_layers(args, text, file)
    return text


def require_selective(args: argparse.Namespace, config: flags.PipelineScheduleConfig) -> None:
    """Raise ValueError where a plan counts on Megatron's selective recomputation, and it is off.

    Raises:
        OSError: the file cannot be read.
    """
    file, asked = config.pipeline_schedule_file, getattr(args, 'recompute_granularity', None)
    if file is not None and asked != 'selective' and formats.load_selective(file):
        raise ValueError(
            f"{file} was planned with Megatron's selective recomputation, without which it holds "
            'more: give --recompute-granularity selective, or plan without --actions selective'
        )


def num_chunks(args: argparse.Namespace, source: str | Schedule) -> int | None:
    """Return chunks a rank that the arguments ask for; None: the schedule has its own.

    Raises:
        ValueError: the schedule of a file has another number.
    """
    asked = sizes.num_chunks(args)
    if not isinstance(source, Schedule):
        return asked
    if asked not in (None, source.placement.num_chunks):
        raise ValueError(
            f'the arguments ask for {asked} chunks on each rank, but the schedule {source.name} of '
            f'--pipeline-schedule-file has {source.placement.num_chunks}: give as many stages in '
            '--pipeline-model-parallel-layout, or leave such flags out'
        )
    return None


def _take_layers(args: argparse.Namespace, text: str, file: Path) -> None:
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


def _take_pattern(args: argparse.Namespace, name: str, text: str, file: Path) -> None:
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
