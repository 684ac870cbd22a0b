"""Run an iteration in place of Megatron: its call is checked, agreed upon, and made a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zbpp.guests.base import ModelLayers
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, layout
from megatron_zbpp.mcore.faces import CallContext, Face
from megatron_zbpp.mcore.iteration.batch import Batch, Executors, NextIteration
from megatron_zbpp.mcore.iteration.model_checks import require_all_layers
from megatron_zbpp.mcore.iteration.stages import Arguments, Call
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.version import __version__

_MODULE = 'megatron.core.pipeline_parallel.schedules'
_PIPELINED = (
    'forward_backward_pipelining_with_interleaving',
    'forward_backward_pipelining_without_interleaving',
)
_TRAINING = 'megatron.training.training'
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


def patches(session: Session, next_iteration: NextIteration) -> Iterator[Patch]:
    """Yield Megatron's two pipelined functions, and the one for iterations that are left out."""
    ours = around(forward_backward, session, next_iteration)
    for name in _PIPELINED:
        yield Patch(_MODULE, name, ours, (f'{_MODULE}:get_forward_backward_func',))
    skipping = around(_of_all_chunks, next_iteration)
    yield Patch(_TRAINING, 'dummy_train_step', skipping, (f'{_TRAINING}:train',), late=True)


def forward_backward(
    session: Session, next_iteration: NextIteration, original: Callable, **arguments: Any
) -> list[Any]:
    """Run one global batch by the session's schedule; arguments and result are Megatron's.

    Several modules in one pipeline, which have process groups each, go to `original`.
    """
    pg_collection = arguments.get('pg_collection')
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        _refuse_delayed(arguments.get('model'))
        return original(**arguments)
    call = Arguments(**arguments)
    batch = next_iteration.take(call) or prepare(session, next_iteration, call)[0]
    timers = batch.config.timers  # Megatron's own
    if timers is not None:
        timers('forward-backward', log_level=1).start(barrier=batch.config.barrier_with_L1_time)
    batch.run(session)
    if not next_iteration.stands():
        batch = prepare(session, next_iteration, call)[0]
        batch.run(session)
    if timers is not None:
        timers('forward-backward').stop()
    return batch.finish(session)


def _refuse_delayed(model: torch.nn.Module | list[torch.nn.Module] | None) -> None:
    for module in model if isinstance(model, list) else [model]:
        if module is not None and transformer_engine.delaying_modules(module):
            raise NotImplementedError(
                "several modules in one pipeline run by Megatron's own schedule, which would lose "
                'the weight gradients that Transformer Engine delays for ours: call '
                'megatron_zbpp.enable() for models of one module only'
            )


def _of_all_chunks(next_iteration: NextIteration, original: Callable, data_iterator: Any) -> None:
    # Megatron's own reads one iterator (--iterations-to-skip, and iterations of a tracker file); a
    # rank with several chunks has a list of them, and a stage in the middle has none
    next_iteration.settle(clean=False)
    given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    iterators = list(filter(None, map(next_iteration.replayed, given)))
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for _ in range(get_num_microbatches()):
            for iterator in iterators:
                next(iterator)


def agreement(
    num_microbatches: int, num_chunks: int, message: Message, forward_only: bool, config: Any
) -> dict[str, object]:
    """Return the fields of a call on which all ranks must agree, except for its schedule.

    From its name and m a release makes the same passes everywhere: they need not be compared.
    """
    by_rank = getattr(getattr(config, 'pipeline_model_parallel_layout', None), 'layout', None)
    return {
        'number of microbatches': num_microbatches,
        'forward only': forward_only,
        'model chunks on each rank': num_chunks,
        'message shape (sequence, micro batch, hidden)': message.shape and tuple(message.shape),
        'message dtype': message.dtype,
        **{name: getattr(config, name, None) for name in _CONFIG},
        'layers (by rank and chunk)': by_rank
        and tuple(tuple(map(len, chunks)) for chunks in by_rank),
        'megatron_zbpp': __version__,
    }


def prepare(
    session: Session, next_iteration: NextIteration, arguments: Arguments, ranks_ahead: int = 0
) -> tuple[Batch, int]:
    """Return a batch, and how many of its instructions come ahead."""
    groups = arguments.pg_collection or compat.default_groups()
    models, programs, training = arguments.models, session.programs, not arguments.forward_only
    config, m, num_ranks = get_model_config(models[0]), arguments.num_microbatches, groups.pp.size()
    _allow(session, arguments, config, num_ranks)
    faces = session.faces_of(programs.trained | programs.traits(num_ranks).techniques)
    pipelines = (face.pipeline(groups) for face in faces)
    pipeline = next((group for group in pipelines if group is not None), groups.pp)
    rank, one = pipeline.rank(), programs.placement(num_ranks)
    device = torch.empty(0, device=torch.cuda.current_device()).device
    replays = programs.replays and training
    call = Call(arguments, session.store, groups.cp.size(), device, programs.num_replicas, replays)
    parts = (face.lengths(arguments, config) for face in faces)
    lengths = next(filter(None, parts), (arguments.seq_length,))
    hops = [_messages(arguments, config, groups, device, length) for length in lengths]
    messages = [hop[0] for hop in hops]

    alike = agreement(m, len(models), messages[0], arguments.forward_only, config)
    alike['side task'] = session.filler is not None
    for each in (*faces, *session.guests):
        alike |= each.fingerprint()
    session.agree(alike | programs.fingerprint(num_ranks, m), pipeline)
    programs.varying = messages[0].shape is None
    drains = [face.drains(arguments.forward_only) for face in faces]
    lowered = programs.lowered(num_ranks, m, arguments.forward_only, any(drains))
    chunks, held = unwrap_model(models), lowered.placement.stages(rank)
    if training and not session.announced:
        _announce(session, faces, lowered, one, chunks[0])
    _require_built(chunks, held, rank, one)
    if models[0] not in session.compared:
        session.compared.add(models[0])
        require = [face.require for face in faces]
        require_all_layers(chunks, one, groups.pp, session.collective, require)

    context = CallContext(arguments, lowered, next_iteration, chunks, rank, messages)
    wraps = {face: wrap for face in faces if (wrap := face.begin(context)) is not None}
    tables, count = lowered.tables(rank, ranks_ahead)
    for face in wraps:
        tables = face.tables(context, tables)
    named = {face.name: wrap for face, wrap in wraps.items()}
    executors = Executors(session, pipeline, context, [*wraps], named)
    mhc = getattr(config, 'enable_mhc_connections', False)
    if len(hops[0]) > 1 or mhc or any(hasattr(chunk, 'hops') for chunk in chunks):
        from megatron_zbpp.mcore.iteration.hops import with_hops

        executors = with_hops(executors, chunks, models[0], hops)
    data = [next_iteration.replayed(iterator) for iterator in arguments.iterators]
    if training and models[0] not in session.trained:
        session.trained.add(models[0])
        asked = session.settings.prewarm
        if asked or (asked is None and device.type != 'cpu'):
            from megatron_zbpp.mcore.iteration.prewarm import prewarmed

            data = prewarmed(executors, call, config, data)
    for face in faces:
        data = face.data(held, data)
    executor = executors.executor(call, data, tables)
    for face in wraps:
        face.enter(executor)
    return Batch(groups, pipeline, config, call, lowered, executor), count


def _require_built(
    chunks: Sequence[torch.nn.Module], held: Sequence[int], rank: int, one: Placement
) -> None:
    for chunk in chunks:
        layout.require_placed(chunk, one)
    if len(chunks) != len(held):
        raise ValueError(
            f'rank {rank} has {len(chunks)} model chunks, but the schedule places {len(held)} '
            'there: build as many as the num_chunks of what megatron_zbpp.enable() returns'
        )


def _allow(session: Session, arguments: Arguments, config: Any, num_ranks: int) -> None:
    from megatron_zbpp.mcore.job import resolve  # has the rules of all schedules

    programs, m = session.programs, None if arguments.forward_only else arguments.num_microbatches
    ddp = getattr(arguments.models[0], 'ddp_config', None)
    sources = config, ddp, compat.training_arguments()
    programs.cuts(config, getattr(config, 'seq_length', None))
    found = resolve.refused(sources, programs, num_ranks, m, session.names)
    refuse_unsupported(config, arguments.adjust_tensor_shapes_fn, found)
    for face in session.faces:
        face.settle(arguments, config, num_ranks)


def _announce(
    session: Session, faces: Sequence[Face], lowered: Lowered, one: Placement, chunk: Any
) -> None:
    session.announced = True
    from megatron_zbpp.mcore.training_log import lines, losses_from_scratch

    others = filter(None, (face.announced(lowered) for face in faces))
    config = get_model_config(chunk)
    notes = (note for face in faces for note in face.notes(config))
    for line in (*lines(next(others, lowered.schedule), config), *notes):
        job_log.info(line)
    job_log.info(losses_from_scratch(session.settings, one, config))

    def describe() -> ModelLayers:
        alike = layout.layers_alike(getattr(chunk, 'config', None))
        return ModelLayers(layout.text_of(chunk, one), alike)

    for guest in session.guests:
        guest.starts(describe)


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
    sizes = {'seq_length': length, 'micro_batch_size': arguments.micro_batch_size}
    shapes = compat.tensor_shapes(groups, config=config, decoder_seq_length=decoder, **sizes)
    return tuple(Message(tuple(shape), config.pipeline_dtype, device) for shape in shapes)


def refuse_unsupported(
    config: Any, adjust_tensor_shapes_fn: Callable | None, found: Iterable[object]
) -> None:
    """Raise for what would be silently wrong, with the cure."""
    if reasons := '. '.join(map(str, found)):
        raise NotImplementedError(f"with this schedule, {reasons}, or use Megatron's own schedule")
    from megatron_zbpp.mcore.job.resolve import require_taken_back

    require_taken_back(config)
    if adjust_tensor_shapes_fn is not None:
        raise NotImplementedError(
            'adjust_tensor_shapes_fn does not work with this schedule: its shapes are for ranks, '
            "not for stages; use Megatron's own schedule"
        )
