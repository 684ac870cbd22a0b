"""Weight gradients that layers of Transformer Engine put off: what waits, and for how long. With
their kernels on a GPU, with emulated ones elsewhere."""

import inspect
import os
import sys
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from example import groups
from gpu import CUDA
from outcome import error_of
from test_te_layers import EXPERTS, FFN, HIDDEN, layer_config

from megatron_zbpp.mcore.iteration.model_checks import every_weight_gradient
from megatron_zbpp.mcore.job.rules import GROUPED_VARIABLE
from megatron_zbpp.mcore.layers import delayed_module, transformer_engine
from megatron_zbpp.runtime.weight_grads import WeightGradStore

pytestmark = [pytest.mark.te, *([pytest.mark.gpu] if CUDA else [])]
pytestmark += [pytest.mark.on_ranks(1), pytest.mark.usefixtures('te_ranks')]


def two_layers(store, of=(4, 4), **options):
    """Two layers of TE without DistributedDataParallel, and what delays in them."""
    from transformer_engine.pytorch import Linear

    torch.manual_seed(1)
    make = {'params_dtype': torch.float32, 'delay_wgrad_compute': True} | options
    layers = torch.nn.ModuleList(Linear(*of, **make) for _ in '12')
    return layers, transformer_engine.Delaying(layers, store)


def backward(store, delaying, k, loss):
    store.open((0, k))
    with store.scope((0, k)), delaying.queueing():
        loss().backward()


def test_each_w_runs_what_its_b_put_off():
    """A layer that one microbatch does not use, such as an expert without tokens."""
    store = WeightGradStore()
    (one, other), delaying = two_layers(store)
    for k, used in enumerate([(one, other), (other,), (one, other)]):
        x = torch.full((2, 4), k + 1.0)
        backward(store, delaying, k, lambda used=used, x=x: sum(f(x).sum() for f in used))
    for k in range(3):
        store.run((0, k))
    assert one.bias.grad.tolist() == [4] * 4 and other.bias.grad.tolist() == [6] * 4
    assert one.weight.grad[0, 0] == 8


@pytest.mark.parametrize('recipe', [False, True], ids=['16 bits', 'FP8'])
def test_a_bias_whose_gradient_is_taken_before_w(recipe):
    """As TE's issue 3400 reports of its own `backward_dw`: no error, and nothing of it in W's."""
    dtype = torch.bfloat16
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    eight_bits = {'enabled': recipe, 'fp8_recipe': Float8CurrentScaling() if recipe else None}
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(dtype)
    found = []
    for clears in (False, True):
        store = WeightGradStore()
        (one, _), delaying = two_layers(store, params_dtype=dtype, of=(32, 16))
        with te.fp8_autocast(**eight_bits):
            output = one(x)
        backward(store, delaying, 0, lambda output=output: output.square().sum())
        taken = one.bias.grad
        one.bias.grad = None if clears else taken
        store.run((0, 0))
        whole = one.bias.grad if taken is None else taken  # 16 bits: it comes with W
        again = clears and taken is not None and one.bias.grad is not None
        found.append((one.weight.grad, whole, again))
    (weight, bias, _), (late, other, again) = found
    assert torch.equal(weight, late) and torch.equal(bias, other) and not again


def test_an_error_leaves_nothing_behind():
    """In an iteration that follows one which failed between B and W."""
    store = WeightGradStore()
    (one, _), delaying = two_layers(store)
    backward(store, delaying, 0, lambda: one(torch.ones(2, 4)).sum())
    store.clear()
    backward(store, delaying, 0, lambda: one(torch.full((2, 4), 5.0)).sum())
    store.run((0, 0))
    assert one.weight.grad[0, 0] == 10


def test_a_weight_gradient_that_nobody_would_run():
    """What nobody announced is an error, but where nothing is to wait."""
    store = WeightGradStore()
    (one, _), _ = two_layers(store)
    one(torch.ones(2, 4)).sum().backward()
    assert one.weight.grad[0, 0] == 2
    said = r'Linear put off its weight gradient(?s:.*) such as 1f1b'
    with store.scope((0, 0)), pytest.raises(RuntimeError, match=said):
        one(torch.ones(2, 4)).sum().backward()


def test_only_what_was_put_off_waits():
    """Gradients where the forward was told that nothing is to wait, and the backward else."""
    store = WeightGradStore()
    (one, _), delaying = two_layers(store)
    output = one(torch.ones(2, 4))
    backward(store, delaying, 0, output.sum)
    store.run((0, 0))
    assert one.weight.grad[0, 0] == one.bias.grad[0] == 2


@pytest.mark.parametrize(
    ('options', 'hooks', 'said'),
    [
        ({'parameters_split': ('query', 'key')}, [], 'parameters_split'),
        ({}, [print], 'DistributedDataParallelConfig'),
        ({}, [], None),
    ],
)
def test_refused(options, hooks, said):
    from transformer_engine.pytorch import Linear

    layer = Linear(4, 4, delay_wgrad_compute=True, **options)
    layer.wgrad_accumulation_and_reduce_hooks = hooks
    found = error_of(transformer_engine.delaying_modules, layer)
    assert said in found if said else found is None


def test_grouped_tensors_are_refused():
    """By the module; by Megatron's settings before the start, see test_refusals."""
    from transformer_engine.pytorch import GroupedLinear

    if 'use_grouped_tensor' not in inspect.signature(GroupedLinear.__init__).parameters:
        return
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    assert not hasattr(GroupedTensor, 'update_usage'), 'it has: can W passes keep it now?'
    with mock.patch.dict(os.environ, {GROUPED_VARIABLE: '1'}):
        made = GroupedLinear(EXPERTS, HIDDEN, FFN, delay_wgrad_compute=True)
    assert made.use_grouped_tensor, 'the variable does nothing: need it be refused?'
    said = error_of(transformer_engine.delaying_modules, made)
    assert 'GroupedLinear uses GroupedTensor, which W passes cannot' in said


def test_hooks_are_registered_once():
    """Of 64 experts in each of 16 layers they were most of a B's time on the host."""
    store = WeightGradStore()
    layers, delaying = two_layers(store)
    counts = []
    for k in range(2):
        hook = mock.patch.object(torch.Tensor, 'register_hook', autospec=True)
        with hook as registered:
            delaying = transformer_engine.Delaying(layers, store)
        with store.scope((0, k)):
            loss = layers[1](layers[0](torch.ones(2, 4))).sum()
        walk = mock.patch.object(torch.nn.Module, 'named_parameters', autospec=True)
        with hook as in_backward, walk as walked:
            backward(store, delaying, k, lambda loss=loss: loss)
        counts.append((registered.call_count, in_backward.call_count, walked.call_count))
    assert counts == [(0, 0, 0)] * 2


def incomplete(hidden, store_runs):
    """What is said after an iteration with a layer that `modules()` does not find, or whose W does
    not run."""
    store = WeightGradStore()
    layers, delaying = two_layers(store)
    if hidden:
        from transformer_engine.pytorch import Linear

        layer = Linear(4, 4, delay_wgrad_compute=True, params_dtype=torch.float32)
        layers.hidden = SimpleNamespace(layer=layer)  # as in TE's op fuser: no module of it
    try:
        for k in range(2):  # the second is not looked at
            with every_weight_gradient([layers], store):
                with store.scope((0, k)):
                    x = layers[0](torch.ones(2, 4))
                    x = layers.hidden.layer(x) if hidden else x
                backward(store, delaying, k, lambda x=x: x.sum())
                if store_runs:
                    store.run((0, k))
    except RuntimeError as error:
        return str(error)
    handles = [p for p in layers.parameters() if len(p._backward_hooks) > 1]
    assert not handles


def test_every_weight_gets_its_gradient():
    """A layer that took no part, here the second, may have none."""
    assert incomplete(False, True) is None
    said = incomplete(False, False)
    assert '0.weight, 0.bias' in said and '1.weight' not in said
    assert 'modules() does not find, from (2, 4) and (2, 4)' in incomplete(True, True)


def calls_of(experts, fused):
    """How often each function of ours is called in a backward of two GroupedLinear modules."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from transformer_engine.pytorch import GroupedLinear

    make = {'bias': False, 'params_dtype': torch.float32, 'delay_wgrad_compute': True}
    make |= {'fuse_wgrad_accumulation': fused}
    layers = torch.nn.ModuleList(GroupedLinear(experts, 16, 16, **make) for _ in '12')
    config, store, found = layer_config('fp32', 'LayerNorm', fused), WeightGradStore(), Counter()

    def count(frame, event, _):
        if event == 'call' and frame.f_code.co_filename == delayed_module.__file__:
            found[frame.f_code.co_name] += 1

    with groups():
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), layers)
        delaying = transformer_engine.Delaying(model, store)
        y = torch.ones(experts, 16, device='cuda').requires_grad_()
        with store.scope((0, 0)):
            for layer in layers:
                y = layer(y, [1] * experts)
        loss = y.sum()
        with model.no_sync():
            sys.setprofile(count)
            try:
                backward(store, delaying, 0, lambda: loss)
            finally:
                sys.setprofile(None)
        store.run((0, 0))
    return found


@pytest.mark.skipif(CUDA, reason='backwards run on another thread')
@pytest.mark.parametrize('fused', [True, False])
def test_experts_cost_the_host_little(fused):
    """For each one more, a B calls one hook of its weight, where products do not add to gradients:
    of 16 modules of 64 experts hooks that it would make anew took 24 ms, these 1 ms."""
    few, many = calls_of(4, fused), calls_of(64, fused)
    assert few['put'] == few['early'] == few['defer'] == 2
    assert many - few == ({} if fused else {'_unshared': 2 * (64 - 4)})
