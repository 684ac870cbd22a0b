"""Our flags in Megatron's own command line.

The flags are the fields of `PipelineScheduleConfig`, their docstrings the help. They are added to
NVIDIA's parser from inside, and what they ask for is prepared right after parsing, before Megatron
looks at its arguments: the schedule is built and checked, what does not work with it is refused,
the layers are laid out for its placement, and the plugin is enabled.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import docstring_parser

import megatron_zbpp
from megatron_zbpp.emulation import cpu, te
from megatron_zbpp.ir import Placement, Schedule, formats
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout, refusals
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings


@dataclass(frozen=True, kw_only=True)
class PipelineScheduleConfig:
    """What the user asks for."""

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
    """After how many steps in a row that were neither clipped nor skipped this begins."""


# What other forks call it: flag, its argparse options, and what it means here.
_V_SCHEDULES = {'zb': 'zb-v', 'half': 'v-half', 'min': 'v-min'}
_LIMIT = '--zero-bubble-max-pending-backward'
_ALIASES: dict[str, dict[str, Any]] = {
    '--enable-zero-bubble': {'action': 'store_true'},
    '--zero-bubble-v-schedule': {'action': 'store_true'},
    '--zero-bubble-v-schedule-mem-setup': {'choices': list(_V_SCHEDULES)},
    _LIMIT: {'metavar': 'A'},
    '--enable-1f1b-v': {'action': 'store_true'},
    '--enable-zbh1-pipeline': {'action': 'store_true'},
    '--allow-padding-num-layers': {'action': 'store_true'},
    '--enable-exactly-numeric-match': {'action': 'store_true'},
    '--zero-bubble-pipeline-timers-start-iter': {'metavar': 'N'},
    '--zero-bubble-pipeline-timers-end-iter': {'metavar': 'N'},
}
_NEEDLESS = {
    'allow_padding_num_layers': 'layers need not divide among the stages',
    'enable_exactly_numeric_match': 'all numbers match exactly, always',
    'zero_bubble_pipeline_timers_start_iter': 'see --pipeline-schedule-profile-iters',
    'zero_bubble_pipeline_timers_end_iter': 'see --pipeline-schedule-profile-iters',
}


def install() -> None:
    """Adds our flags to the command line of `megatron.training`; again does nothing more.

    Raises:
        RuntimeError: it has no command line where we know it.
    """
    from megatron.training import arguments

    original = arguments.add_megatron_arguments
    if getattr(original, '_with_our_flags', False):
        return
    if original.__name__ not in arguments.parse_args.__code__.co_names:
        raise RuntimeError(
            'megatron.training.arguments.parse_args does not use add_megatron_arguments in this '
            'release: our flags would be unknown; call megatron_zbpp.enable() in the script instead'
        )

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        _make_printable(parser)
        add_arguments(parser)
        parser.parse_known_args = _preparing(parser.parse_known_args)
        return parser

    add_megatron_arguments._with_our_flags = True
    arguments.add_megatron_arguments = add_megatron_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one group for `PipelineScheduleConfig`, and one for what other forks call it."""
    group = parser.add_argument_group('pipeline schedule (megatron_zbpp)')
    types = get_type_hints(PipelineScheduleConfig)
    helps = {
        param.arg_name: param.description
        for param in docstring_parser.parse_from_object(PipelineScheduleConfig).params
    }
    for field in fields(PipelineScheduleConfig):
        kind = next(t for t in (*get_args(types[field.name]), types[field.name]) if t is not None)
        text = ' '.join(helps[field.name].split())
        if kind is bool:
            group.add_argument(flag(field.name), action='store_true', help=text)
            continue
        default = '' if field.default is None else f' Default: {field.default:g}.'
        group.add_argument(
            flag(field.name),
            type=kind,
            default=field.default,
            metavar={str: 'NAME', Path: 'PATH', float: 'NUMBER', int: 'N'}[kind],
            help=text + default,
        )
    aliases = parser.add_argument_group('pipeline schedule: names of other forks, deprecated')
    for alias, options in _ALIASES.items():
        aliases.add_argument(alias, help='says what to use instead', **options)


def _make_printable(parser: argparse.ArgumentParser) -> None:
    """Doubles the percent signs of texts that argparse cannot format: 0.18 and later have one, so
    that their --help ends in a traceback."""
    for action in filter(lambda action: action.help, parser._actions):
        try:
            parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace('%', '%%')


def flag(name: str) -> str:
    """The flag that sets the argument of that name."""
    return '--' + name.replace('_', '-')


def _preparing(parse: Callable) -> Callable:
    """`parse`, and then `prepare`; a value that makes no sense ends the program with status 2."""

    @functools.wraps(parse)
    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        namespace, rest = parse(*args, **kwargs)
        try:
            prepare(namespace)
        except (OSError, ValueError, NotImplementedError) as error:
            if int(os.environ.get('LOCAL_RANK', 0)) == 0:  # a file may be missing on one node only
                what, *more = str(error).splitlines()
                hint = ' (`zbpp check` shows the place)' if more else ''
                name = Path(sys.argv[0]).name
                print(f'{name}: error: {what}{hint}', file=sys.stderr, flush=True)
            raise SystemExit(2) from None
        return namespace, rest

    return parse_known_args


def prepare(args: argparse.Namespace) -> Plugin | None:
    """Does what the flags ask for; None where they ask for nothing.

    Args:
        args: Megatron's arguments, not validated yet; the layout of layers is written into them.

    Raises:
        ValueError: a value that cannot work, with the cure.
        NotImplementedError: a combination that is refused, with the cure.
    """
    config = read(args)
    if config is None:
        return None
    if args.pipeline_model_parallel_size == 1:
        _say('one pipeline rank has no pipeline: --pipeline-schedule changes nothing')
        return None
    require_plain(args)
    source, chunks = source_of(config), num_chunks(args)
    settings = Settings(source, chunks, config.pipeline_schedule_memory_limit)
    placement = Programs(settings).placement(args.pipeline_model_parallel_size)
    reasons = list(refusals.refused(args, cpu.installed(), te.installed(), placement))
    if reasons:
        raise NotImplementedError('with --pipeline-schedule, ' + '. '.join(map(str, reasons)))
    plugin = megatron_zbpp.enable(
        source,
        chunks,
        memory_limit=config.pipeline_schedule_memory_limit,
        watchdog_timeout=config.pipeline_watchdog_timeout,
        watchdog_pause_timeout=config.pipeline_watchdog_pause_timeout,
        post_validation=clean_steps(config),
        profile_iters=config.pipeline_schedule_profile_iters,
        trace_dir=config.pipeline_trace_dir,
        flags=vars(args),
    )
    if config.enable_optimizer_post_validation and disable_rerun_checks(args, sys.argv):
        _say('--rerun-mode disabled, or all ranks would wait for each other in each iteration')
    for num_microbatches in sorted(microbatches(args, int(os.environ.get('WORLD_SIZE', 1)))):
        plugin.session.programs.lowered(
            args.pipeline_model_parallel_size, num_microbatches, forward_only=False
        )
    place_layers(args, placement)
    return plugin


def read(args: argparse.Namespace) -> PipelineScheduleConfig | None:
    """What the flags ask for, those of other forks translated with a message; None: nothing."""
    values = {field.name: getattr(args, field.name) for field in fields(PipelineScheduleConfig)}
    renamed = _renamed(args)
    for name, value in renamed.items():
        if values[name] not in (None, value):
            raise ValueError(
                f'{flag(name)} {values[name]} and a flag that means {value}: give one of them'
            )
    if renamed:
        instead = ' '.join(f'{flag(name)} {value}' for name, value in renamed.items())
        _say(f'deprecated flags: use {instead}')
    for name, why in _NEEDLESS.items():
        if getattr(args, name):
            _say(f'{flag(name)} has no effect: {why}')
    values |= renamed
    config = PipelineScheduleConfig(**values)
    if config.pipeline_schedule is None and config.pipeline_schedule_file is None:
        return None
    return config


def _renamed(args: argparse.Namespace) -> dict[str, Any]:
    """Values of our fields that flags of other forks stand for.

    Raises:
        ValueError: flags that contradict each other, or a limit that is no number.
    """
    setup, limit = args.zero_bubble_v_schedule_mem_setup, args.zero_bubble_max_pending_backward
    meant = {
        '1f1b-v': args.enable_1f1b_v,
        'zb-h1': args.enable_zbh1_pipeline,
        _V_SCHEDULES[setup or 'zb']: args.zero_bubble_v_schedule or setup,
    }
    names = [name for name, given in meant.items() if given]
    if len(names) > 1:
        raise ValueError(f'flags that mean {" and ".join(names)}: give --pipeline-schedule instead')
    if names or not args.enable_zero_bubble:
        if limit is not None:
            _say(f'{_LIMIT} {limit} has no effect: it is a limit for --enable-zero-bubble alone')
        return {'pipeline_schedule': names[0]} if names else {}
    if limit in (None, 'auto'):
        return {'pipeline_schedule': 'zb-1p'}
    try:
        return {'pipeline_schedule': 'zb-1p', 'pipeline_schedule_memory_limit': float(limit)}
    except ValueError:
        raise ValueError(f'{_LIMIT} {limit}: give a number, or auto') from None


def source_of(config: PipelineScheduleConfig) -> str | Schedule:
    """The schedule's name, or the schedule in the file.

    Raises:
        ValueError: both a name and a file, or a file that makes no sense.
        OSError: the file cannot be read.
    """
    if config.pipeline_schedule_file is None:
        return config.pipeline_schedule
    if config.pipeline_schedule is not None:
        raise ValueError(
            f'--pipeline-schedule {config.pipeline_schedule} and --pipeline-schedule-file '
            f'{config.pipeline_schedule_file}: give one of them'
        )
    return formats.load(config.pipeline_schedule_file)


def clean_steps(config: PipelineScheduleConfig) -> int | bool:
    """What `megatron_zbpp.enable` takes for post-validation.

    Raises:
        ValueError: a number of steps that makes no sense.
    """
    steps = config.optimizer_post_validation_clean_steps
    if steps < 1:
        name = flag('optimizer_post_validation_clean_steps')
        raise ValueError(f'{name} {steps}: give 1 or more')
    return config.enable_optimizer_post_validation and steps


def disable_rerun_checks(args: argparse.Namespace, words: Sequence[str]) -> bool:
    """Ranks need not agree in each iteration on whether it is to be run again, unless that was
    asked for: whether anything had to be changed.

    Args:
        args: Megatron's arguments; `rerun_mode` is written into them.
        words: the command line that they come from.
    """
    asked = any(word.partition('=')[0] == '--rerun-mode' for word in words)
    if asked or getattr(args, 'rerun_mode', 'disabled') == 'disabled':
        return False
    args.rerun_mode = 'disabled'
    return True


def num_chunks(args: argparse.Namespace) -> int | None:
    """Chunks a rank, as Megatron's own flags give them; None: the schedule's choice.

    Raises:
        ValueError: they do not divide.
    """
    ranks = args.pipeline_model_parallel_size
    segments = hybrid_layers(args)
    if segments is not None:
        return len(segments) // ranks if len(segments) > ranks else None
    text = args.pipeline_model_parallel_layout
    if text is not None:
        try:
            stages = layout.StageLayout.get_num_stages_from_str(text)
        except AssertionError as error:
            raise ValueError(f'--pipeline-model-parallel-layout {text}: {error}') from None
        if stages % ranks:
            raise ValueError(
                f'--pipeline-model-parallel-layout {text} has {stages} stages, which do not divide '
                f'among {ranks} pipeline ranks: give each rank as many, divided by |'
            )
        return stages // ranks
    each = args.num_layers_per_virtual_pipeline_stage
    if each is None:
        return args.num_virtual_stages_per_pipeline_rank
    counted = args.num_layers + sum(_ends(args))
    if counted % (ranks * each):
        raise ValueError(
            f'--num-layers-per-virtual-pipeline-stage {each} does not divide {counted} layers '
            f'among {ranks} pipeline ranks: leave it out, or change --num-layers'
        )
    return counted // (ranks * each)


def hybrid_layers(args: argparse.Namespace) -> list[int] | None:
    """Layers of each segment that a hybrid model's pattern has; None: it is no hybrid model.

    The pattern may end in those of multi-token prediction. Without segments it is divided evenly
    among the ranks.
    """
    name = refusals.hybrid(args)
    if name is None:
        return None
    pattern = getattr(args, name)
    if not isinstance(pattern, str):  # a ratio, of releases that know no segments
        return [args.num_layers]
    return [len(segment) for segment in pattern.partition('/')[0].split('|')]


def _ends(args: argparse.Namespace) -> tuple[bool, bool]:
    """Whether embedding and loss count as a layer each."""
    return args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split


def place_layers(args: argparse.Namespace, placement: Placement) -> None:
    """Writes the layout of the layers for `placement` into Megatron's arguments.

    One chunk a rank, in a loop, is what Megatron does by itself if all get as many; and a hybrid
    model's layers are where its pattern says.

    Raises:
        ValueError: too few layers, or another number of segments than stages.
    """
    segments = hybrid_layers(args)
    if segments is not None:
        undivided = len(segments) == placement.num_chunks == 1
        if len(segments) != placement.num_stages and not undivided:
            raise ValueError(
                f'--hybrid-layer-pattern has {len(segments)} segments, but the schedule places '
                f'{placement.num_stages} stages: give that many, divided by |'
            )
        return
    embedding, loss = _ends(args)
    uneven = (args.num_layers + embedding + loss) % placement.num_stages
    if placement == Placement.loop(placement.num_ranks) and not uneven:
        return
    if args.pipeline_model_parallel_layout is None:
        layers = layers_per_stage(args.num_layers, placement, embedding, loss)
        args.pipeline_model_parallel_layout = layout_string(layers)
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.overlap_p2p_comm = True  # else Megatron refuses two ranks with chunks; ours always overlap


def require_plain(args: argparse.Namespace) -> None:
    """Raises where the layers are not known yet, or are given in a way that no layout can take.

    Raises:
        ValueError: names the flag.
    """
    for name, cure in (
        ('yaml_cfg', 'give the arguments as flags'),
        ('use_checkpoint_args', 'give the arguments of the checkpoint as flags'),
        ('decoder_first_pipeline_num_layers', 'use --pipeline-model-parallel-layout'),
        ('decoder_last_pipeline_num_layers', 'use --pipeline-model-parallel-layout'),
    ):
        if getattr(args, name, None):
            raise ValueError(f'{flag(name)} does not work with --pipeline-schedule: {cure}')
    if args.num_layers is None and hybrid_layers(args) in (None, [None]):
        raise ValueError('--num-layers is missing')


def microbatches(args: argparse.Namespace, world_size: int) -> set[int]:
    """Numbers of microbatches that training begins and ends with, and those of its steps."""
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    step = world_size // model * (args.micro_batch_size or 0)
    ramp = getattr(args, 'rampup_batch_size', None) or []
    steps = re.findall(r':\s*(\d+)', getattr(args, 'step_batch_size_schedule', None) or '')
    sizes = {*map(int, [*steps, *ramp[:1]])}
    if not steps:
        sizes.add(args.global_batch_size or step)
    # sizes that do not divide are Megatron's to refuse
    return {size // step for size in sizes if step and size >= step}


def _rank() -> int:
    return int(os.environ.get('RANK', 0))


def _say(message: str) -> None:
    """Tells the user once, not on every rank."""
    if _rank() == 0:
        print(f'megatron_zbpp: {message}', file=sys.stderr, flush=True)
