"""Frozen weights, as fine-tuning of adapters has them: W has the adapters' gradients alone.

To the bit as Megatron's own schedule; where nothing of a stage trains, its W is empty and free.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
from example import MODEL, forget_groups
from stock import trained as trained_by_stock
from supported import supports

STEPS = 3
# how many layers' gradients wait for a W, on stages of one layer and of two; the last has one more,
# and the first adapter has nothing to wait for where the embedding before it is frozen
WAITED = {
    'adapters': {'zb-v': {1, 2}, 'zb-h1': {3, 4}},
    'embedding': {'zb-v': {4, 5}, 'zb-h1': {8, 9}},
    'half the layers': {'zb-v': {0, 4, 5}, 'zb-h1': {4, 5}},
    'all but the output layer': {'zb-v': {0, 1}, 'zb-h1': {0, 1}},
}


def adapted(linear, config, outputs):
    """Megatron's own linear layer, and beside it two narrow ones that train."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            narrow = {'config': config, 'bias': False, 'init_method': config.init_method}
            self.base = linear
            self.down = ColumnParallelLinear(config.hidden_size, 4, **narrow)
            self.up = ColumnParallelLinear(4, outputs, **narrow)

        def forward(self, input):
            output, bias = self.base(input)
            return output + self.up(self.down(input)[0])[0], bias

    return Adapted()


def freeze(chunks, kind):
    """Before weights are drawn and the chunks are wrapped."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = {
                'adapters': False,
                'embedding': not name.startswith('embedding.'),
                'half the layers': True,
                'all but the output layer': name.startswith('output_layer.'),
            }[kind]
        for layer in chunk.decoder.layers:
            if kind == 'half the layers' and layer.layer_number % 2:
                layer.requires_grad_(False)
            if kind == 'adapters':
                attention, config = layer.self_attention, chunk.config
                attention.linear_qkv = adapted(attention.linear_qkv, config, 3 * config.hidden_size)


def run_layers_again(chunks):
    """Megatron's full recomputation, layer by layer."""
    for chunk in chunks:
        chunk.config.recompute_granularity = 'full'
        chunk.config.recompute_method, chunk.config.recompute_num_layers = 'uniform', 1


def without_gradients(models):
    """Which parameters that train have gradients of zeros alone, by layer in the model."""
    found = set()
    for model in models:
        for layer in model.module.decoder.layers:
            training = [p for p in layer.parameters() if p.requires_grad]
            if training and not any(p.main_grad.any() for p in training):
                found.add(layer.layer_number)
    return found


def trained(argv, kind, again=False):
    """Losses of the last rank in hex, hashes of all weights, and how many waited in each W."""
    import pretrain_gpt as script
    import report

    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    waited = []

    def draw_weights(chunks, seed, original=script.draw_weights):
        freeze(chunks, kind)
        original(chunks, seed)
        if again:
            run_layers_again(chunks)

    def run(store, key, original=WeightGradStore.run):
        waited.append(len(store._pending[key]))
        original(store, key)

    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(script, 'draw_weights', draw_weights))
            stack.enter_context(mock.patch.object(WeightGradStore, 'run', run))
            args = script.parse_args(list(map(str, argv)))
            plugin = script.enable(args, stack)
            script.initialize(args)
            models = script.build_model(args)
            optimizer, _ = script.build_optimizer(args, models)
            for group in optimizer.param_groups:
                group['lr'] = 1e-2
            data = script.iterators(args, script.build_datasets(args)[0], 0)
            losses = []
            for _ in range(STEPS):
                for model in models:
                    model.zero_grad_buffer()
                optimizer.zero_grad()
                loss = script.run_batch(args, models, data)
                assert optimizer.step()[0]
                losses.append(loss and loss.hex())
            hashes = report.fingerprint(report.by_layer(models), optimizer)
            passes = plugin.latest.record.passes if plugin else ()
            count = sum(p.kind == 'W' for p in passes)
            return losses, hashes, waited, count, without_gradients(models)
    finally:
        forget_groups()


@supports('frozen weights: {kind}', 'zb-v zb-h1')
@pytest.mark.parametrize('kind', WAITED)
def test_identical_to_megatron(ranks, data, kind):
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, '--clip-grad', 1e9]
    argv += ['--global-batch-size', 4, '--train-iters', STEPS, '--data-path', data]
    argv += ['--untie-embeddings-and-output-weights']
    stock = trained_by_stock(ranks(2), trained, [*argv, '--pipeline-schedule', 'megatron'], kind)
    assert len({*stock[-1][0]}) == STEPS
    for schedule in ('zb-v', 'zb-h1'):
        ours = ranks(2).run(trained, [*argv, '--pipeline-schedule', schedule], kind)
        assert [rank[:2] for rank in ours] == [rank[:2] for rank in stock], schedule
        assert all(rank[3] for rank in ours), 'there are W passes'
        assert {count for rank in ours for count in rank[2]} == WAITED[kind][schedule]


@supports("frozen weights: adapters, with Megatron's full recomputation", 'zb-h1')
def test_adapters_and_full_recomputation(ranks, data):
    """With a frozen embedding no layer of the first stage gets gradients: that is Megatron's own.

    Its checkpoint gives gradients where its input has some, and what a frozen embedding gives has
    none (Megatron-Bridge's issue 1750). A V has fewer layers in that stage, so more of them train.
    """
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2, '--clip-grad', 1e9]
    argv += ['--global-batch-size', 4, '--train-iters', STEPS, '--data-path', data]
    argv += ['--untie-embeddings-and-output-weights', '--pipeline-schedule']
    stock, ours, v = (
        ranks(2).run(trained, [*argv, schedule], 'adapters', True)
        for schedule in ('megatron', 'zb-h1', 'zb-v')
    )
    assert [rank[:2] for rank in ours] == [rank[:2] for rank in stock]
    assert len({*stock[-1][0]}) == STEPS
    for found, first in ((stock, {1, 2}), (ours, {1, 2}), (v, {1})):
        assert set().union(*(rank[4] for rank in found)) == first, 'limits.md tells of it'
