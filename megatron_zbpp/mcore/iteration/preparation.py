"""Make a batch ready: its call is checked, agreed upon, and given programs and stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zbpp.guests.base import ModelLayers
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, layout, model_settings, preflight, replicas
from megatron_zbpp.mcore.iteration import combined
from megatron_zbpp.mcore.iteration.announcement import announce
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.batch import Batch, NextIteration
from megatron_zbpp.mcore.iteration.built import require_all_layers
from megatron_zbpp.mcore.iteration.executors import Data, Executors
from megatron_zbpp.mcore.iteration.stages import Call, ModelStage
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
    num_microbatches: int,
    num_chunks: int,
    message: Message,
    forward_only: bool,
    config: Any,
) -> dict[str, object]:
    """Return the fields of a call on which all ranks must agree, except for its schedule.

    From its name and m a release makes the same passes everywhere: they need not be compared.

    Args:
        num_microbatches: m.
        num_chunks: of the model on this rank.
        message: what neighbours exchange.
        forward_only: whether this is an evaluation.
        config: of the model.
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
    """Return a batch, and how many of its instructions come ahead.

    Args:
        session: whose schedule it is.
        next_iteration: gives what its stages read.
        arguments: of the call.
        ranks_ahead: how many ranks of the chain go ahead.
    """
    groups = arguments.pg_collection or compat.default_groups()
    models = arguments.models
    config = get_model_config(models[0])
    _allow(session, arguments, config, groups.pp.size())
    pipeline = replicas.pipeline(session, groups)
    rank, one = pipeline.rank(), session.programs.placement(groups.pp.size())
    sizes = groups.cp.size(), _device(), session.programs.num_replicas
    replays = session.programs.replays and not arguments.forward_only
    call = Call(arguments, session.store, *sizes, replays)
    _find_slices(session, arguments, config, groups.pp.size())
    cuts = session.programs.cuts(config, arguments.seq_length)
    hops = [
        _messages(arguments, config, groups, call.device, end - start)
        for start, end in itertools.pairwise(cuts)
    ]
    messages = [hop[0] for hop in hops]
    shape = messages[0], cuts
    lowered = _agreed(session, arguments, config, shape, groups.pp.size(), pipeline)
    if not arguments.forward_only and not session.announced:
        _announce(session, lowered, one, config, models[0])
    endless = None if lowered.calls is None else session.endless
    if arguments.forward_only and session.endless is not None:
        session.endless.finish_step()  # an evaluation has the newest weights
    reading = _reading(session, call)
    held = lowered.placement.stages(rank)
    _require_built(models, held, rank, one)
    if models[0] not in session.compared:
        session.compared.add(models[0])
        collective, require = session.watchdog.collective, None
        if session.programs.num_slices > 1:
            from megatron_zbpp.mcore.patches.slices import require
        require_all_layers(unwrap_model(models), one, groups.pp, collective, require)
    make = _maker(session, next_iteration, arguments, lowered, cuts, rank)
    tables, count = lowered.tables(rank, ranks_ahead)
    if endless is not None and lowered.calls is not None:
        tables = endless.next_tables(lowered.calls, rank)
    executors = _with_hops(Executors(session, lowered, pipeline, messages, make), models, hops)
    data = [next_iteration.replayed(iterator) for iterator in arguments.iterators]
    if not arguments.forward_only and models[0] not in session.trained:
        session.trained.add(models[0])
        data = _prewarmed(executors, call, config, data)
    if reading is not None:
        data = list(map(reading.of, held, data))
    executor = executors.executor(call, data, tables)
    if endless is not None:
        endless.enter(executor)
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
    programs.join(getattr(config, model_settings.OVERLAP, False))


def _maker(
    session: Session,
    next_iteration: NextIteration,
    arguments: Arguments,
    lowered: Lowered,
    cuts: Sequence[int],
    rank: int,
) -> Callable[..., ModelStage]:
    models, programs = arguments.models, session.programs
    if programs.shards_vocabulary:
        from megatron_zbpp.mcore.iteration import embedding, vocabulary

        vocabulary.require(unwrap_model(models), arguments)
    if len(cuts) > 2:
        from megatron_zbpp.mcore.iteration import sliced

        sliced.require(arguments)
        stage = sliced.SlicedStage
        if programs.shards_vocabulary:
            from megatron_zbpp.mcore.iteration import sliced_vocabulary

            stage = sliced_vocabulary.STAGES[programs.shards_embedding]
        return functools.partial(stage, cuts, session.slicing)
    if lowered.calls is not None and session.endless is not None:
        from megatron_zbpp.mcore.iteration import asynchronous

        return asynchronous.maker(session, next_iteration, lowered, models, rank)
    if programs.shards_vocabulary:
        both = programs.shards_embedding
        return embedding.EmbeddingStage if both else vocabulary.VocabularyStage
    if programs.together and not arguments.forward_only:
        combined.require(unwrap_model(models), arguments.forward_step_func)
        return combined.CombinedStage
    return ModelStage


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


def _find_slices(session: Session, arguments: Arguments, config: Any, num_ranks: int) -> None:
    """Settle on slices at the first call, where they are to be found, and say which."""
    if not session.programs.to_find_slices:
        return
    told = SimpleNamespace(**vars(config), seq_length=arguments.seq_length)
    counts = [arguments.num_microbatches]
    settings, found = preflight.with_slices(session.settings, told, num_ranks, counts)
    assert settings.sliced is not None
    session.programs.slice_by(settings.sliced)
    job_log.info(found)


def _agreed(
    session: Session,
    arguments: Arguments,
    config: Any,
    shape: tuple[Message, Sequence[int]],
    num_ranks: int,
    pipeline: torch.distributed.ProcessGroup,
) -> Lowered:
    """Return the programs of all ranks, once they have found that they mean the same."""
    sizes = num_ranks, arguments.num_microbatches
    message, cuts = shape
    alike = agreement(sizes[1], len(arguments.models), message, arguments.forward_only, config)
    if len(cuts) > 2:
        alike['first tokens of slices'] = cuts
    alike['side task'] = session.filler is not None
    for guest in session.guests:
        alike |= guest.fingerprint()
    session.agree(alike | session.programs.fingerprint(*sizes), pipeline)
    session.programs.varying = isinstance(message, Message) and message.shape is None
    warm = not arguments.forward_only and session.endless is not None and session.endless.warms_up()
    return session.programs.lowered(*sizes, arguments.forward_only, warm)


def _announce(
    session: Session,
    lowered: Lowered,
    one: Placement,
    config: Any,
    first_chunk: torch.nn.Module,
) -> None:
    session.announced = True
    from megatron_zbpp.mcore.same_start.losses import losses_from_scratch

    schedule = lowered.schedule
    if session.endless is not None and lowered.calls is None:
        sizes = schedule.num_ranks, schedule.num_microbatches
        job_log.info(
            '%d optimizer steps of %s before', session.settings.async_warmup_steps, schedule.name
        )
        schedule = session.programs.lowered(*sizes, forward_only=False).schedule
    announce(schedule, config)
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

    Args:
        config: of the model.
        adjust_tensor_shapes_fn: of the call.
        found: settings that are refused: see `preflight`.

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
