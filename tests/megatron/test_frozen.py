"""Frozen weights, as adapters have them, and TimelyFreeze: W has what trains alone."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import nvidia
import pytest
import report
import torch
from defined import require_defined, watched
from events import before
from example import groups, program, words
from grids import some
from stock import trained as trained_by_stock
from supported import supports

import megatron_zbpp
from benchmarks.pipelines.runners import ZbppRunner
from benchmarks.training.model import Gpt
from megatron_zbpp.mcore import enabled
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

STEPS = 3
UNTIED = ['--untie-embeddings-and-output-weights', '--clip-grad', 1e9, '--train-iters', STEPS]
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

    waited = []

    def draw_weights(chunks, seed, original=script.draw_weights):
        freeze(chunks, kind)
        original(chunks, seed)
        for chunk in chunks if again else ():  # Megatron's full recomputation, layer by layer
            chunk.config.recompute_granularity = 'full'
            chunk.config.recompute_method, chunk.config.recompute_num_layers = 'uniform', 1

    waits = WeightGradStore, 'run', lambda store, key: waited.append(len(store._pending[key]))
    with (
        mock.patch.object(script, 'draw_weights', draw_weights),
        before(waits),
        program(argv) as at,
    ):
        for group in at.optimizer.param_groups:
            group['lr'] = 1e-2
        losses = [loss and loss.hex() for loss in (at.step() for _ in range(STEPS))]
        hashes = report.fingerprint(report.by_layer(at.models), at.optimizer)
        passes = at.plugin.latest.record.passes if at.plugin else ()
        count = sum(p.kind == 'W' for p in passes)
        return losses, hashes, waited, count, without_gradients(at.models)


@supports('frozen weights: {kind}', 'zb-v zb-h1')
@pytest.mark.parametrize('kind', WAITED)
def test_identical_to_megatron(ranks, data, kind):
    stock = trained_by_stock(ranks(2), trained, words(data, 'megatron', *UNTIED), kind)
    assert len({*stock[-1][0]}) == STEPS
    for schedule in ('zb-v', 'zb-h1'):
        ours = ranks(2).run(trained, words(data, schedule, *UNTIED), kind)
        assert [rank[:2] for rank in ours] == [rank[:2] for rank in stock], schedule
        assert all(rank[3] for rank in ours), 'there are W passes'
        assert {count for rank in ours for count in rank[2]} == WAITED[kind][schedule]


@supports("frozen weights: adapters, with Megatron's full recomputation", 'zb-h1')
def test_adapters_and_full_recomputation(ranks, data):
    """With a frozen embedding no layer of the first stage gets gradients: that is Megatron's own.
    Its checkpoint gives gradients where its input has some, and what a frozen embedding gives has
    none (Megatron-Bridge's issue 1750). A V has fewer layers in that stage, so more of them
    train."""
    stock, ours, v = (
        ranks(2).run(trained, words(data, schedule, *UNTIED), 'adapters', True)
        for schedule in ('megatron', 'zb-h1', 'zb-v')
    )
    assert [rank[:2] for rank in ours] == [rank[:2] for rank in stock]
    assert len({*stock[-1][0]}) == STEPS
    for found, first in ((stock, {1, 2}), (ours, {1, 2}), (v, {1})):
        assert set().union(*(rank[4] for rank in found)) == first, 'limits.md tells of it'


FLAGS = ['--pipeline-model-parallel-size', 2, '--clip-grad', 1e9, '--train-iters', 40]
BEGINS = 31  # the step, from 0: one of warm-up, thirty of monitoring


def plan(folder, ratio, name='zb-h1', m=4):
    schedule = build(name, 2, m)
    ratios = [(p, ratio) for order in schedule.passes for p in order if p.kind in ('W', 'BW')]
    file = folder / f'{ratio}.json'
    made = FreezePlan(schedule, tuple(ratios), 8.0, 9.0, warm_up=1, unit=1)
    file.write_text(made.to_json())
    return ['--pipeline-schedule', name, '--pipeline-freeze', file]


@contextmanager
def counted(training):
    """How many weight gradients this rank left out, of how many, by which step; and what hooks of
    parameters were called with."""
    with watched(training) as hooks:
        found = [hooks]
        yield found
        (freezing,) = enabled.plugin.session.guests
        found += [freezing.left_out, freezing.seen, freezing.step]


@nvidia.needs_training
@some('name', ['zb-h1'], 'zb-v')
def test_freezing(ranks, tmp_path, name):
    """To the bit of the same without it until it begins; and then what was planned."""
    flags = [*FLAGS, '--global-batch-size', 4]
    stock = nvidia.run(ranks(2), *flags, '--pipeline-schedule', name)
    nothing = nvidia.run(ranks(2), *flags, *plan(tmp_path, 0.0, name), event=counted)
    assert nothing.losses == stock.losses and nothing.parameters == stock.parameters
    half = nvidia.run(ranks(2), *flags, *plan(tmp_path, 0.5, name), event=counted)
    # the loss of a step is that of the weights before it
    same = {at: loss for at, loss in stock.losses.items() if at <= BEGINS + 1}
    assert {at: half.losses[at] for at in same} == same
    assert all(half.losses[at] != stock.losses[at] for at in range(BEGINS + 3, 41))
    for _, out, seen, steps in half.reported:
        assert steps == 40
        assert out / seen == pytest.approx(0.5 * (40 - BEGINS) / 40, rel=0.15)
    assert nothing.reported[0][1] == 0


@nvidia.needs_training
def test_replicas_and_overlap(ranks, tmp_path):
    """Both replicas leave out the same, whether gradients are reduced amid W or behind it. Behind
    it hooks need no gradient; amid it those that are left out must be defined, too."""
    flags = [*FLAGS, '--global-batch-size', 8, *plan(tmp_path, 0.5)]
    plain = nvidia.run(ranks(4), *flags, event=counted)
    overlapped = nvidia.run(ranks(4), *flags, '--overlap-grad-reduce', event=counted)
    require_defined([hooks for hooks, *_ in overlapped.reported])
    assert plain.losses == overlapped.losses and plain.parameters == overlapped.parameters
    one, same, two, alike = (out for _, out, _, _ in plain.reported)
    assert (one, two) == (same, alike) and one > 0


@nvidia.needs_training
def test_a_resumed_run_goes_on_in_its_phase(ranks, tmp_path):
    """From the step of the checkpoint on, not from the first."""
    flags = [*FLAGS, '--global-batch-size', 4, *plan(tmp_path, 0.5)]
    whole = nvidia.run(ranks(2), *flags, '--save', tmp_path, '--save-interval', 34, event=counted)
    rest = nvidia.run(ranks(2), *flags, '--load', tmp_path, '--ckpt-step', 34, event=counted)
    assert rest.losses == {at: loss for at, loss in whole.losses.items() if at > 34}
    assert rest.parameters == whole.parameters


def stepped(file, steps, first):
    """The gradients of each step of a loop of one's own, on this rank, as sums in hex."""
    freezing = partial(megatron_zbpp.enable, freeze=file)
    with groups(pp=2):
        with mock.patch.object(megatron_zbpp, 'enable', freezing):
            gpt = Gpt(4, 32, 16, 8, 64)
            runner = ZbppRunner(build('zb-h1', 2, 4), 'zb-h1', gpt, optimizer=False)
        if first:
            runner.plugin.resume(first)
        found = []
        with runner.ready():
            for _ in range(steps):
                runner.iterate()
                # none where all of a step were left out
                grads = [p.grad for p in runner.parameters if p.grad is not None]
                found.append(sum(grad.abs().sum().item() for grad in grads).hex())
        return found


def test_a_loop_of_ones_own_resumes_in_its_phase(ranks, tmp_path):
    """It says at which step; weights are the same in all steps here, gradients as drawn."""
    *_, file = plan(tmp_path, 0.5)
    whole = ranks(2).run(stepped, file, BEGINS + 12, 0)
    rest = ranks(2).run(stepped, file, 8, BEGINS + 4)
    for every, later in zip(whole, rest, strict=True):
        assert len({*every[:BEGINS]}) == 1, 'nothing is left out'
        assert later == every[BEGINS + 4 :]
        assert every[0] not in later and len({*later}) > 1, 'drawn anew at a step of ten'
