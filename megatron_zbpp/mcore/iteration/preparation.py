"""Make a batch ready: its call is checked, agreed upon, and given programs and stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zbpp.guests.base import ModelLayers
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, layout, preflight, replicas
from megatron_zbpp.mcore.faces import CallContext, Face
from megatron_zbpp.mcore.iteration.announcement import announce
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.batch import Batch, NextIteration
from megatron_zbpp.mcore.iteration.built import require_all_layers
from megatron_zbpp.mcore.iteration.executors import Data, Executors
from megatron_zbpp.mcore.iteration.stages import Call
from megatron_zbpp.mcore.job.rules import Refusal
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.version import __version__

if TYPE_CHECKING:
    from megatron_zbpp.mcore.reading import Reading

# of TransformerConfig: what gives stages their shape, and what makes ranks communicate
_CONFIG = (
    'num_layers',
    'hidden_size',
    'ffn_hidden_size',
    'num_attention_heads',
    'num_query_groups',
    'num_moe_experts',
    'moe_router_topk',
    'params_dtype',
    'tensor_model_parallel_size',
    'context_parallel_size',
    'expert_model_parallel_size',
    'sequence_parallel',
    'calculate_per_token_loss',
    'overlap_moe_expert_parallel_comm',
)


def agreement(
    num_microbatches: int,  # m
    num_chunks: int,  # of the model on this rank
    message: Message,  # what neighbours exchange
    forward_only: bool,  # whether this is an evaluation
    config: Any,  # of the model
) -> dict[str, object]:
    """Return the fields of a call on which all ranks must agree, except for its schedule.

    From its name and m a release makes the same passes everywhere: they need not be compared.
    """
    return {
        'number of microbatches': num_microbatches,
        'forward only': forward_only,
        'model chunks on each rank': num_chunks,
        'message shape (sequence, micro batch, hidden)': message.shape and tuple(message.shape),
        'message dtype': message.dtype,
        **{name: getattr(config, name, None) for name in _CONFIG},
        'layers (by rank and chunk)': _layers(config),
        'megatron_zbpp': __version__,
    }


def _layers(config: Any) -> object:
    by_rank = getattr(getattr(config, 'pipeline_model_parallel_layout', None), 'layout', None)
    return by_rank and tuple(tuple(len(chunk) for chunk in chunks) for chunks in by_rank)


def prepare(
    session: Session, next_iteration: NextIteration, arguments: Arguments, ranks_ahead: int = 0
) -> tuple[Batch, int]:
    """Return a batch, and how many of its instructions come ahead."""
    groups = arguments.pg_collection or compat.default_groups()
    models, programs = arguments.models, session.programs
    config = get_model_config(models[0])
    _allow(session, arguments, config, groups.pp.size())
    pipeline = replicas.pipeline(session, groups)
    rank, one = pipeline.rank(), programs.placement(groups.pp.size())
    sizes = groups.cp.size(), _device(), programs.num_replicas
    call = Call(arguments, session.store, *sizes, programs.replays and not arguments.forward_only)
    faces = session.faces_of(programs.trained | programs.techniques(groups.pp.size()))
    parts = (face.lengths(arguments, config) for face in faces)
    lengths = next(filter(None, parts), (arguments.seq_length,))
    hops = [_messages(arguments, config, groups, call.device, length) for length in lengths]
    messages = [hop[0] for hop in hops]
    lowered = _agreed(session, faces, arguments, config, messages[0], groups.pp.size(), pipeline)
    if not arguments.forward_only and not session.announced:
        _announce(session, faces, lowered, one, config, models[0])
    reading = _reading(session, call)
    held = lowered.placement.stages(rank)
    _require_built(models, held, rank, one)
    chunks = unwrap_model(models)
    if models[0] not in session.compared:
        session.compared.add(models[0])
        require = [face.require for face in faces]
        require_all_layers(chunks, one, groups.pp, session.watchdog.collective, require)
    context = CallContext(arguments, lowered, next_iteration, chunks, rank, messages)
    wraps = {face: wrap for face in faces if (wrap := face.begin(context)) is not None}
    tables, count = lowered.tables(rank, ranks_ahead)
    for face in wraps:
        tables = face.tables(context, tables)
    named = {face.name: wrap for face, wrap in wraps.items()}
    executors = _with_hops(Executors(session, pipeline, context, [*wraps], named), models, hops)
    data = [next_iteration.replayed(iterator) for iterator in arguments.iterators]
    if not arguments.forward_only and models[0] not in session.trained:
        session.trained.add(models[0])
        data = _prewarmed(executors, call, config, data)
    if reading is not None:
        data = list(map(reading.of, held, data))
    executor = executors.executor(call, data, tables)
    for face in wraps:
        face.enter(executor)
    return Batch(groups, pipeline, config, call, lowered, executor, reading), count


def _require_built(
    models: Sequence[torch.nn.Module], held: Sequence[int], rank: int, one: Placement
) -> None:
    """Raise ValueError unless the chunks of this rank were built for the stages that it holds."""
    for model in models:
        layout.require_placed(cast(torch.nn.Module, unwrap_model(model)), one)
    if len(models) != len(held):
        raise ValueError(
            f'rank {rank} has {len(models)} model chunks, but the schedule places {len(held)} '
            'there: build as many as the num_chunks of what megatron_zbpp.enable() returns'
        )


def _prewarmed(executors: Executors, call: Call, config: Any, data: Data) -> Data:
    """Return the data of the first iteration, prepared in parallel where that is asked for."""
    asked = executors.session.settings.prewarm
    if asked is False or (asked is None and call.device.type == 'cpu'):
        return data
    from megatron_zbpp.mcore.iteration.prewarm import prewarmed

    return prewarmed(executors, call, config, data)


def _allow(session: Session, arguments: Arguments, config: Any, num_ranks: int) -> None:
    programs = session.programs
    num_microbatches = None if arguments.forward_only else arguments.num_microbatches
    others = getattr(arguments.models[0], 'ddp_config', None), compat.training_arguments()
    found = preflight.refused(config, programs, num_ranks, num_microbatches, others=others)
    refuse_unsupported(config, arguments.adjust_tensor_shapes_fn, found)
    for face in session.faces:
        face.settle(arguments, config, num_ranks)


def _with_hops(
    executors: Executors, models: Sequence[torch.nn.Module], hops: Sequence[tuple[Message, ...]]
) -> Executors:
    chunks = unwrap_model([*models])
    mhc = getattr(get_model_config(models[0]), 'enable_mhc_connections', False)
    if len(hops[0]) == 1 and not mhc and not any(hasattr(chunk, 'hops') for chunk in chunks):
        return executors
    from megatron_zbpp.mcore.iteration.hops import with_hops

    return with_hops(executors, chunks, models[0], hops)


def _reading(session: Session, call: Call) -> Reading | None:
    forward_only = call.arguments.forward_only
    if call.num_replicas == 1 or forward_only in session.read_alike:
        return None
    from megatron_zbpp.mcore.reading import Reading

    session.read_alike.add(forward_only)
    return Reading()


def _agreed(
    session: Session,
    faces: Sequence[Face],
    arguments: Arguments,
    config: Any,
    message: Message,
    num_ranks: int,
    pipeline: torch.distributed.ProcessGroup,
) -> Lowered:
    """Return the programs of all ranks, once they have found that they mean the same."""
    sizes = num_ranks, arguments.num_microbatches
    alike = agreement(sizes[1], len(arguments.models), message, arguments.forward_only, config)
    alike['side task'] = session.filler is not None
    for each in (*faces, *session.guests):
        alike |= each.fingerprint()
    session.agree(alike | session.programs.fingerprint(*sizes), pipeline)
    session.programs.varying = message.shape is None
    drains = [face.drains(arguments.forward_only) for face in faces]
    return session.programs.lowered(*sizes, arguments.forward_only, any(drains))


def _announce(
    session: Session,
    faces: Sequence[Face],
    lowered: Lowered,
    one: Placement,
    config: Any,
    first_chunk: torch.nn.Module,
) -> None:
    session.announced = True
    from megatron_zbpp.mcore.start.scratch_losses import losses_from_scratch

    schedules = (face.announced(lowered) for face in faces)
    others = (schedule for schedule in schedules if schedule is not lowered.schedule)
    announce(next(others, lowered.schedule), config)
    job_log.info(losses_from_scratch(session.settings, one, config))
    chunk = cast(torch.nn.Module, unwrap_model(first_chunk))

    def describe() -> ModelLayers:
        text = layout.text_of(chunk, one)
        return ModelLayers(text, layout.layers_alike(getattr(chunk, 'config', None)))

    for guest in session.guests:
        guest.starts(describe)


def _device() -> torch.device:
    return torch.empty(0, device=torch.cuda.current_device()).device


def _messages(
    arguments: Arguments,
    config: Any,
    groups: ProcessGroupCollection,
    device: torch.device,
    length: int,
) -> tuple[Message, ...]:
    """Return messages of `length` tokens; as Megatron has it, all shapes vary where some may."""
    if config.variable_seq_lengths or getattr(config, 'mtp_standalone', False):
        return (Message(None, config.pipeline_dtype, device),)
    # Megatron's function for several chunks takes no notice of the decoder's
    decoder: Any = arguments.decoder_seq_length if len(arguments.models) == 1 else None
    shapes = compat.tensor_shapes(
        groups,
        seq_length=length,
        micro_batch_size=arguments.micro_batch_size,
        decoder_seq_length=decoder,
        config=config,
    )
    return tuple(Message(tuple(shape), config.pipeline_dtype, device) for shape in shapes)


def refuse_unsupported(
    config: Any, adjust_tensor_shapes_fn: Callable | None, found: Iterable[Refusal]
) -> None:
    """Raise for what would be silently wrong, with the cure.

    Raises:
        NotImplementedError: names the setting.
    """
    if reasons := '. '.join(map(str, found)):
        raise NotImplementedError(f"with this schedule, {reasons}, or use Megatron's own schedule")
    preflight.require_taken_back(config)
    if adjust_tensor_shapes_fn is not None:
        raise NotImplementedError(
            'adjust_tensor_shapes_fn does not work with this schedule: its shapes are for ranks, '
            "not for stages; use Megatron's own schedule"
        )
