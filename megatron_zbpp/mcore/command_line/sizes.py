"""Layers, chunks and microbatches by Megatron's own arguments, not validated yet."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout, model_settings
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import AUTO
from megatron_zbpp.schedules import checked_chunks, find


def require_plain(args: argparse.Namespace) -> None:
    """Raise where the layers are not known yet, or are given in a way that no layout can take.

    Raises:
        ValueError: names the flag.
    """
    for name, cure in (
        ('yaml_cfg', 'give the arguments as flags'),
        ('use_checkpoint_args', 'give the arguments of the checkpoint as flags'),
    ):
        if getattr(args, name, None):
            raise ValueError(f'{flag(name)} does not work with --pipeline-schedule: {cure}')
    if args.num_layers is None and hybrid_layers(args) in (None, [None]):
        raise ValueError('--num-layers is missing: give how many layers the model has')


def num_chunks(args: argparse.Namespace) -> int | None:
    """Return chunks a rank, as Megatron's own flags give them; None: the schedule's choice.

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
            known = isinstance(text, list)  # of a program; as a flag it is text
            stages = len(text) if known else layout.StageLayout.get_num_stages_from_str(text)
        except AssertionError as error:
            cure = 'give the letters E, t, m, L and |'
            raise ValueError(f'--pipeline-model-parallel-layout {text}: {error}: {cure}') from None
        if stages % ranks:
            raise ValueError(
                f'--pipeline-model-parallel-layout {text} has {stages} stages, which do not divide '
                f'among {ranks} pipeline ranks: give each rank as many, divided by |'
            )
        return stages // ranks
    each = args.num_layers_per_virtual_pipeline_stage
    if each is None:
        return args.num_virtual_stages_per_pipeline_rank
    counted = args.num_layers + sum(counted_ends(args))
    if counted % (ranks * each):
        raise ValueError(
            f'--num-layers-per-virtual-pipeline-stage {each} does not divide {counted} layers '
            f'among {ranks} pipeline ranks: leave it out, or change --num-layers'
        )
    return counted // (ranks * each)


def chunks_for(args: argparse.Namespace, schedule: str) -> int | None:
    """Return as `num_chunks`, for a schedule by its name.

    Raises:
        ValueError: it cannot have so many; the cure names the flag that asks for them.
    """
    asked = num_chunks(args)
    if asked is not None and schedule != AUTO:
        found = find(schedule)
        checked_chunks(found, asked, _fewer_chunks(args, found.default_chunks))
    return asked


def _fewer_chunks(args: argparse.Namespace, wanted: int) -> str:
    stages, hybrid = wanted * args.pipeline_model_parallel_size, model_settings.hybrid(args)
    if hybrid is not None:
        return f'give {flag(hybrid)} {stages} segments'
    if args.pipeline_model_parallel_layout is not None:
        return f'leave --pipeline-model-parallel-layout out, or give it {stages} stages'
    if args.num_layers_per_virtual_pipeline_stage is not None:
        return 'leave --num-layers-per-virtual-pipeline-stage out'
    return f'leave --num-virtual-stages-per-pipeline-rank out, or give it {wanted}'


def hybrid_layers(args: argparse.Namespace) -> list[int] | None:
    """Return the number of layers in each segment of a hybrid model's pattern; None: no hybrid.

    Layers of multi-token prediction at the end of the pattern do not count. A pattern without
    segments is one; Megatron divides it evenly among the ranks.
    """
    name = model_settings.hybrid(args)
    if name is None:
        return None
    pattern = getattr(args, name)
    if not isinstance(pattern, str):  # a ratio, of releases that know no segments
        return [args.num_layers]
    return [len(segment) for segment in pattern.partition('/')[0].split('|')]


def counted_ends(args: argparse.Namespace) -> tuple[bool, bool]:
    """Return whether embedding and loss count as a layer each."""
    return args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split


def fixed_layers(args: argparse.Namespace, placement: Placement) -> dict[int, int]:
    """Return the layers of stages that `--decoder-first` and `-last-pipeline-num-layers` give.

    In a loop they are those of all chunks of first and last rank, as Megatron has it; elsewhere one
    rank may hold both ends, and they are those of a rank of chunks like the first or last one.

    Raises:
        ValueError: they do not divide among the chunks.
    """
    fixed = {}
    for name, end in (
        ('decoder_first_pipeline_num_layers', 0),
        ('decoder_last_pipeline_num_layers', placement.num_stages - 1),
    ):
        layers = getattr(args, name, None)
        if layers is None:
            continue
        each, left = divmod(layers, placement.num_chunks)
        if left:
            raise ValueError(
                f'{flag(name)} {layers} does not divide among {placement.num_chunks} chunks: give '
                'a multiple, or --pipeline-model-parallel-layout'
            )
        same = placement.stages(placement.only_route[end]) if placement.is_loop else (end,)
        fixed |= dict.fromkeys(same, each)
    return fixed


def place_layers(args: argparse.Namespace, placement: Placement) -> None:
    """Write the layout of the layers for `placement` into Megatron's arguments.

    One chunk a rank, in a loop, is what Megatron does by itself if all get as many, or the ends are
    given. A hybrid model's layers are where its pattern says; one that is not divided yet is
    divided here.

    Raises:
        ValueError: too few layers, or another number of segments than stages.
    """
    hybrid = model_settings.hybrid(args)
    if hybrid is not None:
        _place_hybrid(args, hybrid, placement)
        return
    embedding, loss = counted_ends(args)
    mtp = getattr(args, 'mtp_num_layers', None) or 0
    fixed = fixed_layers(args, placement)
    uneven = (args.num_layers + embedding + loss) % placement.num_stages and not fixed
    if placement == Placement.loop(placement.num_ranks) and not uneven:
        return
    if args.pipeline_model_parallel_layout is None:
        layers = layers_per_stage(args.num_layers, placement, embedding, loss + mtp, fixed)
        args.pipeline_model_parallel_layout = layout_string(layers, mtp)
    elif fixed:
        raise ValueError(
            '--pipeline-model-parallel-layout says how many layers all stages have: drop '
            '--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers'
        )
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
    args.num_layers_per_virtual_pipeline_stage = args.num_virtual_stages_per_pipeline_rank = None
    args.overlap_p2p_comm = True  # else Megatron refuses two ranks with chunks; ours always overlap


def _place_hybrid(args: argparse.Namespace, name: str, placement: Placement) -> None:
    """Divide the pattern of a hybrid model, `name` of the arguments, among the stages."""
    pattern = getattr(args, name)
    if not isinstance(pattern, str):
        return  # a ratio, of releases that know no segments
    main, slash, rest = pattern.partition('/')
    segments = main.split('|')
    if len(segments) == placement.num_chunks == 1:
        return  # Megatron divides it
    if len(segments) == 1:
        layers = layers_per_stage(len(main), placement)
        ends = list(itertools.accumulate(layers))
        segments = [main[end - count : end] for count, end in zip(layers, ends, strict=True)]
    if len(segments) != placement.num_stages:
        raise ValueError(
            f'{flag(name)} has {len(segments)} segments, but the schedule places '
            f'{placement.num_stages} stages: give that many, divided by |'
        )
    setattr(args, name, '|'.join(segments) + slash + rest)
    args.overlap_p2p_comm = True  # as for other models


def stock_layout(args: argparse.Namespace) -> str | None:
    """Return the stages of the same launch line without us, in the language of Megatron's layout.

    None where Megatron cannot share out its layers so: then there is no such training.
    """
    given, hybrid = args.pipeline_model_parallel_layout, hybrid_layers(args)
    where = Placement.loop(args.pipeline_model_parallel_size, num_chunks(args) or 1)
    mtp = getattr(args, 'mtp_num_layers', None) or 0
    if hybrid is not None:
        name = model_settings.hybrid(args)
        counts, total = hybrid, sum(hybrid)
        mtp = '/' in str(getattr(args, name or ''))
    elif given is not None:
        return layout.text_of_stages(given)
    else:
        counts, total = [], args.num_layers
    if total < where.num_stages:
        return None
    if len(counts) != where.num_stages:
        fixed = fixed_layers(args, where)
        try:
            counts = layers_per_stage(total, where, *counted_ends(args), fixed)
        except ValueError:
            return None  # stages of ours may do, or are refused by their own numbers
    return layout_string(counts, mtp)


def replicas(args: argparse.Namespace, world_size: int) -> int:
    """Return the data-parallel size."""
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    return world_size // model


def microbatches(args: argparse.Namespace, world_size: int) -> set[int]:
    """Return with how many microbatches training begins and ends, and its steps between."""
    step = replicas(args, world_size) * (args.micro_batch_size or 0)
    ramp = getattr(args, 'rampup_batch_size', None) or []
    steps = re.findall(r':\s*(\d+)', getattr(args, 'step_batch_size_schedule', None) or '')
    sizes = {*map(int, [*steps, *ramp[:1]])}
    if not steps:
        sizes.add(args.global_batch_size or step)
    # sizes that do not divide are Megatron's to refuse
    return {size // step for size in sizes if step and size >= step}


def require_every_size(args: argparse.Namespace, world_size: int, programs: Programs) -> None:
    """Raise where a ramp-up or an evaluation has a number of microbatches that cannot be run.

    Raises:
        ValueError: names the flag.
    """
    ranks, copies = args.pipeline_model_parallel_size, replicas(args, world_size)
    step = copies * (args.micro_batch_size or 0)
    calls: list[tuple[str, int, int]] = []  # flag, its batch, samples at a time
    ramp = [*map(int, getattr(args, 'rampup_batch_size', None) or ())]
    if len(ramp) == 3 and ramp[1] > 0:
        between = range(ramp[0], args.global_batch_size or step, ramp[1])
        calls += [('rampup_batch_size', size, step) for size in between]
    whole, micro = (getattr(args, f'eval_{size}_batch_size', None) for size in ('global', 'micro'))
    evaluates = getattr(args, 'eval_iters', None) != 0 or getattr(args, 'full_validation', False)
    if evaluates and not programs.asynchronous:  # whose evaluations drain, by another schedule
        size, at_once = whole or args.global_batch_size or step, copies * micro if micro else step
        calls += [('eval_global_batch_size', size, at_once)] if whole else []
        calls += [('eval_micro_batch_size', size, at_once)] if micro and not whole else []
    for name, size, at_once in calls:
        if not at_once or size < at_once:
            continue  # Megatron's to refuse
        try:
            programs.schedule(ranks, size // at_once)
        except ValueError as error:
            words = f'{flag(name)} gives batches of {size}, {size // at_once} microbatches'
            raise ValueError(f'{words}: {error}') from None


def disable_rerun_checks(args: argparse.Namespace, words: Sequence[str]) -> bool:
    """Return whether ranks had to be told not to agree on whether an iteration is run again.

    They need not, unless that was asked for.

    Args:
        args: Megatron's arguments; `rerun_mode` is written into them.
        words: the command line that they come from.
    """
    asked = any(word.partition('=')[0] == '--rerun-mode' for word in words)
    if asked or getattr(args, 'rerun_mode', 'disabled') == 'disabled':
        return False
    args.rerun_mode = 'disabled'
    return True
