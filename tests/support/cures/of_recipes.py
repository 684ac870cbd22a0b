"""Rows of Megatron-Bridge's recipes."""

from __future__ import annotations

from types import SimpleNamespace

from cures.asking import recipe
from cures.row import row

RECIPES = {
    'validated': row(
        recipe(pipeline_model_parallel_layout=SimpleNamespace()),
        'call megatron_zbpp.bridge.enable before config.validate() and pretrain(), and give the '
        'layout as text',
        recipe(pipeline_model_parallel_layout='Et|t|t|tL'),
    ),
    'groups': row(
        recipe(change=lambda own: setattr(own.dist, 'use_decentralized_pg', True)),
        'leave it False',
        recipe(),
    ),
    'microbatches that go both ways': row(
        recipe('chimera'), 'take a schedule of one route, such as zb-v', recipe()
    ),
    'versions of weights': row(
        recipe('paci'), 'or take a synchronous schedule, such as zb-v', recipe()
    ),
    'a hybrid model': row(
        recipe(hybrid_layer_pattern='***-'),
        'take a schedule that has one, such as zb-h1',
        recipe('zb-h1', hybrid_layer_pattern='***-'),
    ),
    'what is refused': row(
        recipe(overlap_moe_expert_parallel_comm=True),
        'take dualpipe-v, or drop overlap_moe_expert_parallel_comm',
        recipe('dualpipe-v', overlap_moe_expert_parallel_comm=True),
        recipe(),
    ),
    'chunks': row(
        recipe(virtual_pipeline_model_parallel_size=3),
        'leave model.virtual_pipeline_model_parallel_size out, or give it 2',
        recipe(),
        recipe(virtual_pipeline_model_parallel_size=2),
    ),
    'a layout that does not divide': row(
        recipe(pipeline_model_parallel_layout='Et|t|ttL'),
        'model.pipeline_model_parallel_layout Et|t|ttL has 3 stages',
        recipe(pipeline_model_parallel_layout='Et|t|t|tL'),
    ),
    'too few layers': row(
        recipe(num_layers=3), 'give each stage a layer (model.num_layers)', recipe(num_layers=4)
    ),
}
