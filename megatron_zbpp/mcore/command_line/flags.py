"""Our flags: the fields of `PipelineScheduleConfig`, their docstrings the help."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args, get_type_hints

import docstring_parser

from megatron_zbpp.analysis.posting import LATE
from megatron_zbpp.ir import Schedule
from megatron_zbpp.ir.formats import PlanFile, load_plan
from megatron_zbpp.mcore.command_line.aliases import add_aliases, announce, translate
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.settings import Settings, folder, freezing
from megatron_zbpp.runtime.groups import MessageKernels
from megatron_zbpp.techniques import ASKED


@dataclass(frozen=True, kw_only=True)
class PipelineScheduleConfig:
    """Our flags: each field is one, and its docstring the help."""

    pipeline_schedule: str | None = None
    """The pipeline schedule by its name, such as zb-v or zb-h1 (`zbpp list` prints all); or auto,
    which measures some iterations, plans a schedule for their times beside the training, and
    switches to it. Without this flag, everything is Megatron's own."""

    pipeline_schedule_file: Path | None = None
    """A schedule to run instead of one by name: JSON as of `zbpp plan`, or CSV as of torch."""

    pipeline_schedule_memory_limit: float | None = None
    """Most that a rank may hold, in activations of one microbatch on a full rank (1F1B holds as
    many as there are pipeline ranks); for auto, and schedules that take a limit, such as zb-1p."""

    pipeline_schedule_profile_iters: int = 5
    """How many iterations auto measures before it plans."""

    pipeline_offload: str | None = None
    """Activations of the chunks of each rank that wait longest are on the host between forward and
    backward, where there is time for both ways: half, all, or how many chunks; or auto, which
    measures how long copies take and keeps what would cost time on the device. Losses stay the same
    to the bit."""

    pipeline_freeze: Path | None = None
    """A plan of `zbpp freeze -o`: weight gradients that it names are left out in its steps, to
    shorten the batch (TimelyFreeze). It trains another model: losses are not those of Megatron."""
    pipeline_recompute: str | None = None
    """Forwards of the chunks of each rank that wait longest keep their input only, and run again
    before their backward, in bubbles first: half, all, or how many chunks. Losses stay the same to
    the bit."""

    pipeline_message_ctas: int = MessageKernels.ctas
    """Most thread blocks of NCCL's kernels for a message between stages. Fewer leave more of the
    GPU to passes that run meanwhile, more make large messages faster."""

    pipeline_message_priority: str = 'high'
    """Priority of these kernels: high, so that a message does not wait for kernels of the next pass
    that are queued with it; or group, that of the pipeline's group, which is normal without
    --high-priority-stream-groups pp."""

    pipeline_message_receives: str = LATE
    """When receives of messages between stages are posted: early, before the pass during which the
    message comes; late, as late as it costs nothing, so that few of NCCL's kernels spin beside
    passes; or latest, so that hardly any does, where messages are short."""

    pipeline_trace_dir: Path | None = None
    """Folder for pictures of an early iteration, and of one after auto has switched, the clocks of
    all hosts aligned: a page for a browser, planned beside measured, and one trace of all ranks of
    the first pipeline for Perfetto."""

    pipeline_watchdog_timeout: float = 300.0
    """Seconds without progress inside a schedule after which a rank reports what it waits for and
    ends the job. 0: wait for ever."""

    pipeline_watchdog_pause_timeout: float | None = None
    """As --pipeline-watchdog-timeout, which must not be 0, for what comes between two schedules:
    checkpoints, evaluation, data. 0: no limit. Default: ten times that, at least 600."""

    enable_optimizer_post_validation: bool = False
    """Optimizer steps do not wait for all ranks: each rank steps on what it knows, begins the next
    iteration, and takes the step back if the gradients have to be clipped or overflow. Losses and
    parameters stay the same to the bit. `zbpp doctor` names what else would make ranks wait."""

    optimizer_post_validation_clean_steps: int = 10
    """After how many steps in a row that were neither clipped nor skipped this begins, or 0."""

    optimizer_post_validation_kept_gib: float | None = None
    """Most GiB of old parameters and optimizer state that a step keeps on the GPU until it is
    validated. What is not kept is stepped twice. Default: what there is memory for."""

    optimizer_post_validation_check_interval: int = 10
    """Behind each N-th of these steps, and each of the first ten, values of weights are compared
    with those that the next iteration has begun with: what a program writes through `.data` shows
    in nothing else. 0: behind the first ten only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one group for `PipelineScheduleConfig`, and one for what other forks call it."""
    group = parser.add_argument_group('pipeline schedule (megatron_zbpp)')
    types = get_type_hints(PipelineScheduleConfig)
    helps = {
        param.arg_name: param.description or ''
        for param in docstring_parser.parse_from_object(PipelineScheduleConfig).params
    }
    for field in fields(PipelineScheduleConfig):
        kind = next(t for t in (*get_args(types[field.name]), types[field.name]) if t is not None)
        text = ' '.join(helps[field.name].split())
        if kind is bool:
            group.add_argument(flag(field.name), action='store_true', help=text)
            continue
        value = field.default if isinstance(field.default, str | None) else f'{field.default:g}'
        default = '' if value is None else f' Default: {value}.'
        group.add_argument(
            flag(field.name),
            type=kind,
            default=field.default,
            metavar={str: 'NAME', Path: 'PATH', float: 'NUMBER', int: 'N'}[kind],
            help=text + default,
        )
    add_aliases(parser)


def read(args: argparse.Namespace) -> PipelineScheduleConfig | None:
    """Return what the flags ask for, those of other forks translated with a word; None: nothing.

    Raises:
        ValueError: flags that contradict each other.
    """
    values = {field.name: getattr(args, field.name) for field in fields(PipelineScheduleConfig)}
    translated = translate(args)
    for name, value in translated.items():
        if values[name] not in (None, value):
            raise ValueError(
                f'{flag(name)} {values[name]} and a flag that means {value}: give one of them'
            )
    announce(args, translated)
    config = PipelineScheduleConfig(**values | translated)
    if config.pipeline_schedule is None and config.pipeline_schedule_file is None:
        for name in ('pipeline_freeze', *(f'pipeline_{name}' for name in ASKED)):
            if getattr(config, name) is not None:
                raise ValueError(f'{flag(name)} is about a --pipeline-schedule: give that, too')
        return None
    return config


def source_of(config: PipelineScheduleConfig) -> str | PlanFile:
    """Return the schedule's name, or what is in the file of the plan.

    Raises:
        ValueError: both a name and a file, or a file that makes no sense.
        OSError: the file cannot be read.
    """
    name, file = config.pipeline_schedule, config.pipeline_schedule_file
    if file is None:
        assert name is not None  # `read` returns no config where both are missing
        return name
    if name is not None:
        raise ValueError(
            f'--pipeline-schedule {name} and --pipeline-schedule-file {file}: give one of them'
        )
    return load_plan(file)


def settings_of(
    config: PipelineScheduleConfig, source: str | Schedule, num_chunks: int | None
) -> Settings:
    """Return what all flags together ask for.

    Args:
        config: the flags.
        source: a name, or a schedule.
        num_chunks: of a rank; None: the schedule's default.

    Raises:
        ValueError: a value that cannot work, with the cure.
        OSError: a file cannot be read.
    """
    clean = _steps(config, 'optimizer_post_validation_clean_steps', 'for the first step on')
    return Settings(
        source,
        num_chunks,
        memory_limit=config.pipeline_schedule_memory_limit,
        watchdog_timeout=config.pipeline_watchdog_timeout,
        watchdog_pause_timeout=config.pipeline_watchdog_pause_timeout,
        post_validation=config.enable_optimizer_post_validation and clean,
        profile_iters=config.pipeline_schedule_profile_iters,
        trace_dir=folder(config.pipeline_trace_dir),
        offload=config.pipeline_offload,
        freeze=freezing(config.pipeline_freeze),
        recompute=config.pipeline_recompute,
        kept_gib=config.optimizer_post_validation_kept_gib,
        check_interval=_steps(
            config, 'optimizer_post_validation_check_interval', 'for the first ten steps only'
        ),
        message_ctas=config.pipeline_message_ctas,
        message_priority=config.pipeline_message_priority,
        message_receives=config.pipeline_message_receives,
    )


def _steps(config: PipelineScheduleConfig, name: str, zero: str) -> int:
    """Return a number of steps; `zero` says what none of them means.

    Raises:
        ValueError: it is below 0.
    """
    steps = getattr(config, name)
    if steps < 0:
        raise ValueError(f'{flag(name)} {steps}: give 0, {zero}, or more')
    return steps
