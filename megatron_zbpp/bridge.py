"""Megatron-Bridge: a recipe's configuration made ready for a schedule of ours.

from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron_zbpp import bridge

bridge.enable(config, 'zb-v')  # config: a recipe's, after all changes to it
pretrain(config, forward_step)

The configuration is read as Megatron's arguments are, and written into as the command line writes
into those.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore import enabled, model_settings
from megatron_zbpp.mcore.job import rules
from megatron_zbpp.mcore.job.resolve import Facts, Job, resolve
from megatron_zbpp.mcore.layout import StageLayout
from megatron_zbpp.mcore.options import made_by
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import BY_BRIDGE, PLACING, Request, Settings
from megatron_zbpp.runtime.log import job_log

__all__ = ['enable']

# Bridge's fields of Megatron's arguments that place layers
_FIELDS = {
    name: BY_BRIDGE.of(name).removeprefix('model.')
    for name in (*PLACING, 'num_virtual_stages_per_pipeline_rank')
}
_OF_TRAINING = (
    *('micro_batch_size', 'global_batch_size', 'rampup_batch_size'),
    *('exit_duration_in_mins', 'exit_signal_handler'),
)
# what `config.comm_overlap` writes into the model's configuration when Bridge validates it
_SUPERSEDED = rules.settings(rules.SUPERSEDED)
_OVERLAPS = ('tp_comm_overlap', model_settings.OVERLAP, *_SUPERSEDED)


def enable(
    config: Any, schedule: str | Schedule = 'zb-h1', num_chunks: int | None = None, **options: Any
) -> Plugin:
    """Enable `schedule` for Megatron-Bridge, and write its needs into `config`.

    That is the layout of the layers and the number of chunks a rank. Call it last, before
    `pretrain(config, forward_step)` or `finetune`.

    Args:
        config: a `ConfigContainer`. A layout of its own must have as many stages as the schedule,
            in model order; `virtual_pipeline_model_parallel_size` is the number of chunks of a
            schedule that leaves the choice.
        schedule: as for `megatron_zbpp.enable`.
        num_chunks: likewise.
        **options: likewise, but for `flags`: those are what `config` has.

    Returns:
        The plugin, as `megatron_zbpp.enable` does.

    Raises:
        ValueError: a setting that cannot work, with the cure.
        NotImplementedError: a setting that is refused, with the cure.
    """
    settings = made_by('bridge.enable', Settings, schedule, num_chunks, **options)
    job = prepare(config, settings)
    assert job.settings is not None
    return enabled.switch(job.settings, job.programs, job.names)


def prepare(config: Any, settings: Settings) -> Job:
    """Check `config`, a `ConfigContainer`, and write the layout of the layers into it.

    Settings of the job have the chunks that `config` asks for, and its values, which all ranks must
    have alike.
    """
    args = _arguments(config)
    # `rerun_mode` counts as given: by default there are no such checks
    facts = Facts.here(args, ('rerun_mode',), _programs, by_bridge=True)
    job = resolve(Request.of(settings, BY_BRIDGE, flags=dict(vars(args))), facts)
    job.require()
    if job.programs is None:
        job_log.warning(job.notes[0])
        return job
    model = _transformer(config)
    for held in (model, config.comm_overlap):
        for name in _SUPERSEDED:
            if getattr(held, name, False) and name in job.writes:
                setattr(held, name, job.writes[name])
    before = model.pipeline_model_parallel_layout
    for name, field in _FIELDS.items():
        setattr(model, field, job.writes.get(name, getattr(args, name)))
    assert job.placement is not None
    chunks = job.placement.num_chunks
    model.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    layout = model.pipeline_model_parallel_layout
    if layout is not None:
        StageLayout(job.placement, layout)  # raises where it has another number of stages
    if layout != before:
        job.notes.append(f'model.pipeline_model_parallel_layout: {layout}')
    for note in job.notes:
        job_log.info(note)
    return job


def _programs(settings: Settings) -> Programs:
    programs = enabled.programs_of(settings)
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
    return programs


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
    values |= {name: getattr(config.train, name, None) for name in _OF_TRAINING}
    evaluation = vars(getattr(config, 'validation', None) or config.train)
    values |= {name: each for name, each in evaluation.items() if name.startswith('eval_')}
    # what Bridge writes into the model's configuration when it validates that
    precision, overlaps = getattr(config, 'mixed_precision', None), config.comm_overlap
    if isinstance(precision, str):
        recipes = importlib.import_module('megatron.bridge.training.mixed_precision')
        precision = recipes.get_mixed_precision_config(precision)
    if precision is not None:
        values |= {name: each for name, each in vars(precision).items() if hasattr(model, name)}
    if overlaps is not None:
        values |= {name: bool(getattr(overlaps, name, False)) for name in _OVERLAPS}
        # else Bridge warns, and leaves it
        shared = model.tensor_model_parallel_size > 1 and model.sequence_parallel
        values['tp_comm_overlap'] &= shared
    tied = getattr(config.model, 'share_embeddings_and_output_weights', False)
    values |= {
        'num_layers_per_virtual_pipeline_stage': None,
        'untie_embeddings_and_output_weights': not tied,
        'swiglu': values.get('gated_linear_unit', False),
        'group_query_attention': bool(values.get('num_query_groups')),
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
