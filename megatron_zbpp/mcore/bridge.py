"""Checks and prepares a configuration of Megatron-Bridge: see `megatron_zbpp.bridge`.

Bridge has no command line. Its configuration is read as Megatron's arguments are, and what the
command line would write into those is written into it.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from dataclasses import replace
from typing import Any

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore import model_settings, preflight
from megatron_zbpp.mcore.command_line import sizes
from megatron_zbpp.mcore.command_line.naming import FLAG_OF, renaming
from megatron_zbpp.mcore.job import rules_table
from megatron_zbpp.mcore.layout import BRIDGE_FIELDS, StageLayout
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.runtime.log import job_log

# Megatron's arguments, and Bridge's fields where those have another name
_FIELDS = {
    **BRIDGE_FIELDS,
    'num_virtual_stages_per_pipeline_rank': 'virtual_pipeline_model_parallel_size',
}
# what messages call by a flag, where Bridge has it under another name than the flag's
_CALLED = {
    'num_layers': 'model.num_layers',
    **{name: f'model.{field}' for name, field in _FIELDS.items()},
    'rope_fusion': 'apply_rope_fusion',
    'fp8_format': 'fp8',
    'fp4_format': 'fp4',
    'untie_embeddings_and_output_weights': 'share_embeddings_and_output_weights=False',
}
_OF_TRAINING = ('micro_batch_size', 'global_batch_size', 'rampup_batch_size')
_OPTIONS = ('exit_duration_in_mins', 'exit_signal_handler')
# what `config.comm_overlap` writes into the model's configuration when Bridge validates it
_TAKEN_BACK = rules_table.settings(rules_table.SUPERSEDED)
_OVERLAPS = ('tp_comm_overlap', model_settings.OVERLAP, *_TAKEN_BACK)


def _by_fields(message: str) -> str:
    """Return a message with Bridge's fields, and arguments of `enable`, in place of flags."""
    for argument, own in FLAG_OF.items():
        message = re.sub(rf'{own}(?![\w-])', argument, message)
    return re.sub(r'--(no-)?([a-z][a-z0-9-]+)', _field, message)


def _field(found: re.Match[str]) -> str:
    name = found[2].replace('-', '_')
    return _CALLED.get(name, name) + ('=False' if found[1] else '')


@renaming(_by_fields)
def prepare(config: Any, settings: Settings) -> Settings:
    """Check `config` for a schedule, and write the layout of the layers into it.

    Args:
        config: a `ConfigContainer`.
        settings: what is asked for.

    Returns:
        The settings, with chunks that `config` asks for, and its values, which all ranks must have
        alike.

    Raises:
        ValueError: a setting that cannot work, with the cure.
        NotImplementedError: a setting that is refused, with the cure.
    """
    args = _arguments(config)
    settings = replace(settings, flags=dict(vars(args)))
    ranks = args.pipeline_model_parallel_size
    if ranks == 1:
        job_log.warning('one pipeline rank has no pipeline: the schedule changes nothing')
        return settings
    if not isinstance(settings.schedule, Schedule) and settings.num_chunks is None:
        settings = replace(settings, num_chunks=sizes.chunks_for(args, settings.schedule))
    if settings.same_start is True:
        settings = replace(settings, same_start=sizes.stock_layout(args) or True)
    programs = Programs(settings)
    if programs.num_replicas > 1:
        raise NotImplementedError(
            f'with schedule {programs.key}, a chunk may read the data of another replica, which '
            "Megatron-Bridge's recipes do not know: take a schedule of one route, such as zb-v"
        )
    if programs.asynchronous:
        raise NotImplementedError(
            f'schedule {programs.key} is asynchronous, which nobody has tried in Megatron-Bridge: '
            "train in NVIDIA's loop or your own, or take a synchronous schedule, such as zb-v"
        )
    placement = programs.placement(ranks)
    machine = preflight.machine()
    refused = preflight.refused(args, programs, ranks, **machine, by_bridge=True)
    reasons = dict.fromkeys(map(str, refused))
    if reasons:
        raise NotImplementedError(f'with schedule {programs.key}, ' + '. '.join(reasons))
    counts = sizes.microbatches(args, int(os.environ.get('WORLD_SIZE', 1)))
    settings, found = preflight.with_slices(settings, args, ranks, counts)
    if found:
        job_log.info(found)
        programs = Programs(settings)
    programs.join(getattr(args, model_settings.OVERLAP, False))
    for count in sorted(counts):
        programs.lowered(ranks, count, forward_only=False)
    sizes.require_every_size(args, int(os.environ.get('WORLD_SIZE', 1)), programs)
    taken = (_transformer(config), config.comm_overlap)
    words = (each for held in taken for each in preflight.take_back(held, programs.splits(ranks)))
    for each in dict.fromkeys(words):
        job_log.info(each)
    _place_layers(_transformer(config), args, placement)
    if settings.post_validation is not None:
        for each in preflight.barriers(args, placement):
            job_log.warning(f'all ranks wait: {each}')
    return settings


def _transformer(config: Any) -> Any:
    """Return the TransformerConfig: the model's provider is one, or it has one."""
    return getattr(config.model, 'transformer', config.model)


def _arguments(config: Any) -> Namespace:
    """Return `config` as Megatron's arguments; writing into them changes nothing in it."""
    model = _transformer(config)
    values = {name: value for name, value in vars(model).items() if not name.startswith('_')}
    values |= {name: getattr(model, field, None) for name, field in _FIELDS.items()}
    layout = values['pipeline_model_parallel_layout']
    if layout is not None and not isinstance(layout, str | list):
        raise ValueError(
            'model.pipeline_model_parallel_layout is an object: call megatron_zbpp.bridge.enable '
            'before config.validate() and pretrain(), and give the layout as text'
        )
    values |= {name: getattr(config.train, name, None) for name in (*_OF_TRAINING, *_OPTIONS)}
    evaluation = vars(getattr(config, 'validation', None) or config.train)
    values |= {name: each for name, each in evaluation.items() if name.startswith('eval_')}
    values |= _overlaps(config)
    tied = getattr(config.model, 'share_embeddings_and_output_weights', False)
    values |= {
        'num_layers_per_virtual_pipeline_stage': None,
        'untie_embeddings_and_output_weights': not tied,
        'hybrid_layer_pattern': getattr(config.model, 'hybrid_layer_pattern', None),
        'num_experts': values.get('num_moe_experts'),
        'rerun_mode': config.rerun_state_machine.rerun_mode,
        'log_interval': config.logger.log_interval,
        'log_params_norm': config.logger.log_params_norm,
        'async_save': config.checkpoint.async_save,
        'use_megatron_fsdp': config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp,
        'use_torch_fsdp2': config.dist.use_torch_fsdp2,
        'dist.use_decentralized_pg': config.dist.use_decentralized_pg,
    }
    return Namespace(**values)


def _overlaps(config: Any) -> dict[str, bool]:
    asked, model = config.comm_overlap, _transformer(config)
    if asked is None:
        return {}
    values = {name: bool(getattr(asked, name, False)) for name in _OVERLAPS}
    # else Bridge warns, and leaves it
    values['tp_comm_overlap'] &= model.tensor_model_parallel_size > 1 and model.sequence_parallel
    return values


def _place_layers(model: Any, args: Namespace, placement: Placement) -> None:
    """Write the layout of the layers into the configuration of the model."""
    before = model.pipeline_model_parallel_layout
    sizes.place_layers(args, placement)
    for name, field in _FIELDS.items():
        setattr(model, field, getattr(args, name))
    chunks = placement.num_chunks
    model.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    layout = model.pipeline_model_parallel_layout
    if layout is not None:
        StageLayout(placement, layout)  # raises where it has another number of stages
    if layout != before:
        job_log.info(f'model.pipeline_model_parallel_layout: {layout}')
