"""Patches of where Megatron looks for the first stage, the layers, the embedding and masks.

Megatron takes stage 0 to be on pipeline rank 0. In a Λ it is on the last rank: some of Megatron's
functions answer otherwise while the plugin is enabled, and everything that asks them (building of
model and data, precision casts, checkpoints) follows. For other placements they answer as ever.

NVIDIA's scripts read batches on the first and the last stage alone; where documents are not to
attend to each other, layers between would take the plain causal mask. By Megatron's 1F1B on two
ranks both stages are such ends, and all layers have the masks. With several chunks a rank the
stages between read them, too: see `given_to_all`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore import layout as layouts
from megatron_zbpp.mcore.patches.registry import Patch, around, replaced
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.log import job_log

Placements = Callable[[int], Placement]  # of so many pipeline ranks
Reads = Callable[[int], int]  # of a chunk here, the data-parallel rank

_CONFIG = 'megatron.core.transformer.transformer_config'
_LANGUAGE = 'megatron.core.models.common.language_module.language_module:LanguageModule'
_BUILDERS = 'megatron.training.models.dist_utils'  # from 0.18 on
# While this is not empty, data is built.
_building: list[bool] = []


def patches(session: Session, reads: Reads) -> Iterator[Patch]:
    """Yield the functions that tell the place of the first stage, and their dependants."""
    placement = session.programs.placement
    stage, groups = 'megatron.core.pipeline_parallel.utils', 'megatron.core.parallel_state'
    asks = (f'{_LANGUAGE}._is_in_embd_group',)
    for owner, name, ours, looked_up_by in (
        (stage, 'is_pp_first_stage', around(_is_pp_first_stage, placement), asks),
        (groups, 'is_pipeline_first_stage', around(_is_pipeline_first_stage, placement), ()),
        (groups, 'initialize_model_parallel', around(_with_ranks, session), ()),
        (compat.segments_module(), compat.SELECT_SEGMENT, around(_segments, placement), ()),
    ):
        if owner is not None:
            yield Patch(owner, name, ours, looked_up_by, everywhere=True)
    layout, makes = 'PipelineParallelLayerLayout', (f'{_CONFIG}:TransformerConfig.__post_init__',)
    yield Patch(_CONFIG, layout, functools.partial(_Layouts, placement), makes)
    yield Patch(_LANGUAGE, '__init__', around(_refusing, placement))

    # asked by NVIDIA's scripts before they read a batch, and before they build its data
    masked = around(lambda original, vp_stage: original(vp_stage) or given_to_all(placement))
    training, utils = 'megatron.training.training', 'megatron.training.utils'
    users = (f'{_BUILDERS}:unimodal_build_distributed_models',)
    for owner, name, ours, looked_up_by in (
        (training, 'get_model', around(_with_chunks, placement), ()),
        (_BUILDERS, 'build_virtual_pipeline_stages', around(_with_known_chunks), users),
        (training, 'build_train_valid_test_data_loaders', around(_with_data, reads), ()),
        (compat.get_batch_module(), compat.GET_BATCH, around(_with_whole_batch, placement), ()),
        (utils, 'is_first_or_last_pipeline_stage', masked, ()),
    ):
        yield Patch(owner, name, ours, looked_up_by, everywhere=True, late=True)


def given_to_all(placement: Placements) -> bool:
    """Return True if every chunk is given the masks of its batches: others than the causal one."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    chunks, args = placement(ranks).num_chunks if ranks > 1 else 1, compat.training_arguments()
    made = getattr(args, 'create_attention_mask_in_dataloader', True)
    return bool(chunks > 1 and made and getattr(args, 'reset_attention_mask', False))


def _is_pp_first_stage(placement: Placements, original: Callable, pp_group: Any) -> bool:
    size = pp_group.size()
    return original(pp_group) if size == 1 else pp_group.rank() == placement(size).only_route[0]


def _is_pipeline_first_stage(
    placement: Placements, original: Callable, ignore_virtual: bool = True, vp_stage: Any = None
) -> bool:
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size == 1:
        return original(ignore_virtual, vp_stage)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    first = rank == placement(size).only_route[0] or (bool(_building) and rank == 0)
    return first and (ignore_virtual or not vp_stage)


def _with_ranks(session: Session, original: Callable, *args: Any, **kwargs: Any) -> None:
    """Run `initialize_model_parallel` once all ranks want the same groups."""
    programs = session.programs
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = bound.arguments.get('get_embedding_ranks') or parallel_state.default_embedding_ranks

    def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
        if len(pp_ranks) == 1 or programs.placement(len(pp_ranks)).only_route[0] == 0:
            return given(pp_ranks)
        return [pp_ranks[-1]]

    plain = (int, str, type(None))
    sizes = {name: value for name, value in bound.arguments.items() if isinstance(value, plain)}
    if dist.group.WORLD is not None:  # without, Megatron says what is missing
        # ranks that want other groups would wait for each other
        session.agree(sizes, dist.group.WORLD)
    bound.arguments['get_embedding_ranks'] = get_embedding_ranks
    original(*bound.args, **bound.kwargs)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        programs.require_pairs(parallel_state.get_data_parallel_world_size())


class _Layouts:
    """Stands for Megatron's class where `TransformerConfig` turns a layout into an object."""

    def __init__(self, placement: Placements, original: type) -> None:
        self._original, self._placement = original, placement
        self.from_str = functools.lru_cache(self)  # configs are made anew for every batch

    def __call__(self, layout: str | list, pipeline_model_parallel_size: int) -> Any:
        if pipeline_model_parallel_size == 1:
            return self._original(layout, pipeline_model_parallel_size)
        return layouts.StageLayout(self._placement(pipeline_model_parallel_size), layout)


def _segments(
    placement: Placements,
    original: Callable,
    main_pattern: str,
    pp_group: Any,
    vp_stage: int | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[list[str], int]:
    """Answer with a chunk's segment of a hybrid model's pattern, whose segments are the stages."""
    where = None if pp_group is None else placement(pp_group.size())
    if pp_group is None or where is None or where.is_loop:
        return original(main_pattern, pp_group, vp_stage, *args, **kwargs)
    segments = main_pattern.split('|')
    if len(segments) != where.num_stages:
        raise ValueError(
            f'the pattern {main_pattern} of the hybrid model has {len(segments)} segments, but '
            f'the schedule places {where.num_stages} stages: give that many, divided by |'
        )
    held = map(where.stages, range(where.num_ranks))
    around_ranks = [segments[stage] for chunk in zip(*held, strict=True) for stage in chunk]
    chunk = layouts.chunk_being_built() if vp_stage is None else vp_stage
    layers, _ = original('|'.join(around_ranks), pp_group, chunk, *args, **kwargs)
    own = where.stages(pp_group.rank())[chunk or 0]
    return layers, sum(map(len, segments[:own]))


def _refusing(
    placement: Placements, original: Callable, model: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse, before any layer is built, a model with layers elsewhere than its stages."""
    if config.pipeline_model_parallel_size > 1:
        from megatron_zbpp.mcore.job import resolve  # has the rules of all schedules

        for name, note in resolve.superseded(config).items():
            setattr(config, name, False)
            job_log.info(note)
        layouts.require_placed(model, placement(config.pipeline_model_parallel_size), config)
    original(model, config, *args, **kwargs)


def _with_whole_batch(placement: Placements, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Give all parts of a batch to every tensor-parallel rank of a rank with both ends.

    Else the first stage gets no labels, the last no tokens, and a stage between them no masks.
    Stages of multi-token prediction need all, too, so that Megatron's function can be asked for it.
    """
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size > 1:
        ranks = placement(size).only_route
        both = parallel_state.get_pipeline_model_parallel_rank() == ranks[0] == ranks[-1]
        whole = both or given_to_all(placement)
        kwargs['mtp_on_this_rank'] = kwargs.get('mtp_on_this_rank', False) or whole
    return original(*args, **kwargs)


def _with_chunks(
    placement: Placements, original: Callable, model_provider: Any, *args: Any, **kwargs: Any
) -> Any:
    size = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = placement(size).num_chunks if size > 1 else 1
    if chunks > 1:
        parameters = inspect.signature(model_provider).parameters
        if not any(p.name == 'vp_stage' or p.kind == p.VAR_KEYWORD for p in parameters.values()):
            raise NotImplementedError(
                f'{layouts.name_of(model_provider)} has no parameter vp_stage, so that it cannot '
                f'tell apart the {chunks} chunks that the schedule has on each rank: take a '
                'schedule with one, such as zb-h1'
            )
    return original(layouts.of_one_chunk(model_provider), *args, **kwargs)


def _with_known_chunks(original: Callable, build_model: Callable, *args: Any, **kwargs: Any) -> Any:
    # where NVIDIA's script gives a model's config instead of a provider
    return original(layouts.of_one_chunk(build_model), *args, **kwargs)


def _with_data(reads: Reads, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Build the data of a chunk, rank 0 for the first stage: that of the replica that it reads."""
    provider = args[0] if args else next(iter(kwargs.values()))
    chunk: Any = getattr(provider, 'keywords', {}).get('vp_stage')
    rank_of = parallel_state.get_data_parallel_rank

    @functools.wraps(rank_of)
    def get_data_parallel_rank(with_context_parallel: bool = False, **more: Any) -> int:
        apart = parallel_state.get_context_parallel_world_size() if with_context_parallel else 1
        return rank_of(with_context_parallel, **more) + apart * (reads(chunk) - own)

    _building.append(True)
    try:
        if chunk is None:
            return original(*args, **kwargs)
        own = rank_of()
        with replaced(parallel_state, 'get_data_parallel_rank', get_data_parallel_rank):
            loaders = original(*args, **kwargs)
    finally:
        _building.pop()
    train, valid, test = loaders
    if all(each is None for each in (train, test, *(valid or ()))):
        reads(chunk)  # nothing here has to ask
    return loaders
