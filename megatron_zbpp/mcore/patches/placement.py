"""Patches of where Megatron looks for the first stage, the layers, the embedding and masks.

Megatron takes stage 0 to be on pipeline rank 0. In a Λ it is on the last rank: some of Megatron's
functions answer otherwise while the plugin is enabled, and everything that asks them (building of
model and data, precision casts, checkpoints) follows. For other placements they answer as ever.

NVIDIA's scripts read batches on the first and the last stage alone; where documents are not to
attend to each other, layers between would take the plain causal mask. By Megatron's 1F1B on two
ranks both stages are such ends, and all layers have the masks. With several chunks a rank the
stages between read them, too: see `needs_masks`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore import compat, model_settings, preflight
from megatron_zbpp.mcore.building import chunk_being_built, name_of, of_one_chunk
from megatron_zbpp.mcore.layout import StageLayout, require_placed
from megatron_zbpp.mcore.patches.registry import Patch
from megatron_zbpp.runtime.log import job_log

Placements = Callable[[int], Placement]  # of so many pipeline ranks
Agree = Callable[[Mapping[str, object], dist.ProcessGroup], None]  # on settings, in a group
Reads = Callable[[int], int]  # of a chunk here, the data-parallel rank
LAYOUT = 'PipelineParallelLayerLayout'

_CONFIG = 'megatron.core.transformer.transformer_config'
_LANGUAGE = 'megatron.core.models.common.language_module.language_module:LanguageModule'
_BUILDERS = 'megatron.training.models.dist_utils'  # from 0.18 on
# While this is not empty, data is built.
_building: list[bool] = []


def patches(
    placement: Placements, agree: Agree, reads: Reads, allow: Callable[[int], None]
) -> Iterator[Patch]:
    """Yield the functions that tell the place of the first stage, and their dependants.

    Args:
        placement: of a number of pipeline ranks.
        agree: called by ranks before they make groups.
        reads: tells whose data a chunk of this rank reads.
        allow: raises for a number of replicas that the schedule cannot run on.
    """

    def wrapped(wrap: Callable[[Any, Placements], Any]) -> Callable[[Any], Any]:
        return lambda original: wrap(original, placement)

    stage, groups = 'megatron.core.pipeline_parallel.utils', 'megatron.core.parallel_state'
    asks = (f'{_LANGUAGE}._is_in_embd_group',)
    ours = wrapped(_is_pp_first_stage)
    yield Patch(stage, 'is_pp_first_stage', ours, asks, everywhere=True)
    ours = wrapped(_is_pipeline_first_stage)
    yield Patch(groups, 'is_pipeline_first_stage', ours, everywhere=True)
    ours = wrapped(functools.partial(_with_embedding_ranks, agree, allow))
    yield Patch(groups, 'initialize_model_parallel', ours, everywhere=True)

    makes = (f'{_CONFIG}:TransformerConfig.__post_init__',)
    yield Patch(_CONFIG, LAYOUT, wrapped(_Layouts), makes)
    yield Patch(_LANGUAGE, '__init__', wrapped(_refusing))

    segments = compat.segments_module()
    if segments is not None:
        yield Patch(segments, compat.SELECT_SEGMENT, wrapped(_segments), everywhere=True)

    training = 'megatron.training.training'
    yield Patch(training, 'get_model', wrapped(_with_chunks), everywhere=True, late=True)
    users = (f'{_BUILDERS}:unimodal_build_distributed_models',)
    stages = 'build_virtual_pipeline_stages'
    yield Patch(_BUILDERS, stages, _with_known_chunks, users, everywhere=True, late=True)
    loaders = 'build_train_valid_test_data_loaders'
    with_data = functools.partial(_with_data_on_rank_0, reads)
    yield Patch(training, loaders, with_data, everywhere=True, late=True)
    batch = compat.get_batch_module(), compat.GET_BATCH
    yield Patch(*batch, wrapped(_with_whole_batch), everywhere=True, late=True)
    ends, ours = 'is_first_or_last_pipeline_stage', wrapped(_with_masks)
    yield Patch('megatron.training.utils', ends, ours, everywhere=True, late=True)


def given_to_all(placement: Placements) -> bool:
    """Return whether every chunk is given the masks of its batches."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = placement(ranks).num_chunks if ranks > 1 else 1
    return chunks > 1 and model_settings.needs_masks(compat.training_arguments())


def _with_masks(original: Callable, placement: Placements) -> Callable:
    """Answer NVIDIA's scripts before they read a batch, and before they build its data."""

    @functools.wraps(original)
    def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
        return original(vp_stage) or given_to_all(placement)

    return is_first_or_last_pipeline_stage


def _is_pp_first_stage(original: Callable, placement: Placements) -> Callable:
    @functools.wraps(original)
    def is_pp_first_stage(pp_group: dist.ProcessGroup) -> bool:
        if pp_group.size() == 1:
            return original(pp_group)
        return pp_group.rank() == placement(pp_group.size()).only_route[0]

    return is_pp_first_stage


def _is_pipeline_first_stage(original: Callable, placement: Placements) -> Callable:
    @functools.wraps(original)
    def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        size = parallel_state.get_pipeline_model_parallel_world_size()
        if size == 1:
            return original(ignore_virtual, vp_stage)
        rank = parallel_state.get_pipeline_model_parallel_rank()
        first = rank == placement(size).only_route[0] or (bool(_building) and rank == 0)
        return first and (ignore_virtual or not vp_stage)

    return is_pipeline_first_stage


def _with_embedding_ranks(
    agree: Agree, allow: Callable[[int], None], original: Callable, placement: Placements
) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments.get('get_embedding_ranks') or parallel_state.default_embedding_ranks

        def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
            if len(pp_ranks) == 1 or placement(len(pp_ranks)).only_route[0] == 0:
                return given(pp_ranks)
            return [pp_ranks[-1]]

        plain = (int, str, type(None))
        sizes = {name: value for name, value in bound.arguments.items() if isinstance(value, plain)}
        if dist.group.WORLD is not None:  # without, Megatron says what is missing
            agree(sizes, dist.group.WORLD)  # ranks that want other groups would wait for each other
        bound.arguments['get_embedding_ranks'] = get_embedding_ranks
        original(*bound.args, **bound.kwargs)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            allow(parallel_state.get_data_parallel_world_size())

    return initialize_model_parallel


class _Layouts:
    """Stands for Megatron's class where `TransformerConfig` turns a layout into an object."""

    def __init__(self, original: type, placement: Placements) -> None:
        self._original = original
        self._placement = placement
        self.from_str = functools.lru_cache(self)  # configs are made anew for every batch

    def __call__(self, layout: str | list, pipeline_model_parallel_size: int) -> Any:
        if pipeline_model_parallel_size == 1:
            return self._original(layout, pipeline_model_parallel_size)
        return StageLayout(self._placement(pipeline_model_parallel_size), layout)


def _segments(original: Callable, placement: Placements) -> Callable:
    """Answer with a chunk's segment of a hybrid model's pattern, whose segments are the stages."""

    @functools.wraps(original)
    def select_pipeline_segment(
        main_pattern: str,
        pp_group: dist.ProcessGroup | None,
        vp_stage: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[str], int]:
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
        around = [segments[stage] for chunk in zip(*held, strict=True) for stage in chunk]
        chunk = chunk_being_built() if vp_stage is None else vp_stage
        layers, _ = original('|'.join(around), pp_group, chunk, *args, **kwargs)
        own = where.stages(pp_group.rank())[chunk or 0]
        return layers, sum(map(len, segments[:own]))

    return select_pipeline_segment


def _refusing(original: Callable, placement: Placements) -> Callable:
    """Refuse, before any layer is built, a model with layers elsewhere than its stages."""

    @functools.wraps(original)
    def __init__(self: LanguageModule, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.pipeline_model_parallel_size > 1:
            for each in preflight.take_back(config):
                job_log.info(each)
            require_placed(self, placement(config.pipeline_model_parallel_size), config)
        original(self, config, *args, **kwargs)

    return __init__


def _with_whole_batch(original: Callable, placement: Placements) -> Callable:
    """Give all parts of a batch to every tensor-parallel rank of a rank with both ends.

    Else the first stage gets no labels, the last no tokens, and a stage between them no masks where
    it needs those. Stages of multi-token prediction need all, too, so that Megatron's function can
    be asked for it.
    """

    @functools.wraps(original)
    def get_batch_on_this_tp_rank(*args: Any, **kwargs: Any) -> Any:
        size = parallel_state.get_pipeline_model_parallel_world_size()
        if size > 1:
            ranks = placement(size).only_route
            both = parallel_state.get_pipeline_model_parallel_rank() == ranks[0] == ranks[-1]
            whole = both or given_to_all(placement)
            kwargs['mtp_on_this_rank'] = kwargs.get('mtp_on_this_rank', False) or whole
        return original(*args, **kwargs)

    return get_batch_on_this_tp_rank


def _with_chunks(original: Callable, placement: Placements) -> Callable:
    """Refuse a model of several chunks a rank whose provider would not know which it builds."""

    @functools.wraps(original)
    def get_model(model_provider: Any, *args: Any, **kwargs: Any) -> Any:
        size = parallel_state.get_pipeline_model_parallel_world_size()
        chunks = placement(size).num_chunks if size > 1 else 1
        if chunks > 1 and not _takes_vp_stage(model_provider):
            raise NotImplementedError(
                f'{name_of(model_provider)} has no parameter vp_stage, so that it cannot tell '
                f'apart the {chunks} chunks that the schedule has on each rank: take a schedule '
                'with one, such as zb-h1'
            )
        return original(of_one_chunk(model_provider), *args, **kwargs)

    return get_model


def _with_known_chunks(original: Callable) -> Callable:
    """Note the chunk also where NVIDIA's script gives a model's config instead of a provider."""

    @functools.wraps(original)
    def build_virtual_pipeline_stages(build_model: Callable, *args: Any, **kwargs: Any) -> Any:
        return original(of_one_chunk(build_model), *args, **kwargs)

    return build_virtual_pipeline_stages


def _takes_vp_stage(provider: Callable) -> bool:
    parameters = inspect.signature(provider).parameters
    return 'vp_stage' in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def _with_data_on_rank_0(reads: Reads, original: Callable) -> Callable:
    @functools.wraps(original)
    def build_train_valid_test_data_loaders(*args: Any, **kwargs: Any) -> Any:
        provider = args[0] if args else next(iter(kwargs.values()))
        chunk = getattr(provider, 'keywords', {}).get('vp_stage')
        _building.append(True)
        try:
            if chunk is None:
                return original(*args, **kwargs)
            with _replica_of(chunk, reads):
                loaders = original(*args, **kwargs)
        finally:
            _building.pop()
        train, valid, test = loaders
        if all(each is None for each in (train, test, *(valid or ()))):
            reads(chunk)  # nothing here has to ask
        return loaders

    return build_train_valid_test_data_loaders


@contextmanager
def _replica_of(chunk: int, reads: Reads) -> Iterator[None]:
    original = parallel_state.get_data_parallel_rank
    own = original()

    @functools.wraps(original)
    def get_data_parallel_rank(with_context_parallel: bool = False, **more: Any) -> int:
        apart = parallel_state.get_context_parallel_world_size() if with_context_parallel else 1
        return original(with_context_parallel, **more) + apart * (reads(chunk) - own)

    parallel_state.get_data_parallel_rank = get_data_parallel_rank
    try:
        yield
    finally:
        parallel_state.get_data_parallel_rank = original
