"""Weight gradients that layers of Transformer Engine put off: what waits, and for how long.

With their kernels on a GPU, with emulated ones elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from example import forget_groups
from gpu import CUDA
from te_modules import EXPERTS, FFN, HIDDEN, layer_config

pytestmark = [pytest.mark.te, *([pytest.mark.gpu] if CUDA else [])]


def two_layers(store, of=(4, 4), **options):
    """Two layers of TE without DistributedDataParallel, and what delays in them."""
    from transformer_engine.pytorch import Linear

    from megatron_zbpp.mcore.layers import transformer_engine

    torch.manual_seed(1)
    make = {'params_dtype': torch.float32, 'delay_wgrad_compute': True} | options
    layers = torch.nn.ModuleList(Linear(*of, **make) for _ in '12')
    return layers, transformer_engine.Delaying(layers, store)


def backward(store, delaying, k, loss):
    store.open((0, k))
    with store.scope((0, k)), delaying.queueing():
        loss().backward()


def unused_in_one():
    """A layer that one microbatch does not use, such as an expert without tokens."""
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    store = WeightGradStore()
    (one, other), delaying = two_layers(store)
    for k, used in enumerate([(one, other), (other,), (one, other)]):
        x = torch.full((2, 4), k + 1.0)
        backward(store, delaying, k, lambda used=used, x=x: sum(f(x).sum() for f in used))
    for k in range(3):
        store.run((0, k))
    return one.bias.grad.tolist(), other.bias.grad.tolist(), one.weight.grad[0, 0].item()


def test_each_w_runs_what_its_b_put_off(te_ranks):
    assert te_ranks(2).run(unused_in_one) == [([4.0] * 4, [6.0] * 4, 8.0)] * 2


def cleared_bias(dtype, recipe):
    """Gradients of weight and bias, and where whoever takes the latter at B drops it before W."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    from megatron_zbpp.runtime.weight_grads import WeightGradStore

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
    return torch.equal(weight, late), torch.equal(bias, other), again


@pytest.mark.parametrize('recipe', [False, True], ids=['16 bits', 'FP8'])
def test_a_bias_whose_gradient_is_taken_before_w(te_ranks, recipe):
    """As TE's issue 3400 reports of its own `backward_dw`: no error, and nothing of it in W's."""
    assert te_ranks(1).run(cleared_bias, torch.bfloat16, recipe) == [(True, True, False)]


def after_an_error():
    """Gradient of an iteration that follows one which failed between B and W."""
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    store = WeightGradStore()
    (one, _), delaying = two_layers(store)
    backward(store, delaying, 0, lambda: one(torch.ones(2, 4)).sum())
    store.clear()
    backward(store, delaying, 0, lambda: one(torch.full((2, 4), 5.0)).sum())
    store.run((0, 0))
    return one.weight.grad[0, 0].item()


def test_an_error_leaves_nothing_behind(te_ranks):
    assert te_ranks(2).run(after_an_error) == [10.0] * 2


def outside_of_a_schedule():
    """What a backward says that nobody announced, and the same where nothing is to wait."""
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    store = WeightGradStore()
    (one, _), _ = two_layers(store)
    one(torch.ones(2, 4)).sum().backward()
    assert one.weight.grad[0, 0].item() == 2
    try:
        with store.scope((0, 0)):
            one(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)


def whole_forward():
    """Gradients where the forward was told that nothing is to wait, and the backward else."""
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    store = WeightGradStore()
    (one, _), delaying = two_layers(store)
    output = one(torch.ones(2, 4))
    backward(store, delaying, 0, output.sum)
    store.run((0, 0))
    return one.weight.grad[0, 0].item(), one.bias.grad[0].item()


def test_only_what_was_put_off_waits(te_ranks):
    assert te_ranks(1).run(whole_forward) == [(2.0, 2.0)]


def test_a_weight_gradient_that_nobody_would_run(te_ranks):
    for said in te_ranks(2).run(outside_of_a_schedule):
        assert 'Linear put off its weight gradient' in said and 'such as 1f1b' in said


def refused(options, hooks):
    """What is said of such a layer."""
    from transformer_engine.pytorch import Linear

    from megatron_zbpp.mcore.layers import transformer_engine

    layer = Linear(4, 4, delay_wgrad_compute=True, **options)
    layer.wgrad_accumulation_and_reduce_hooks = hooks
    try:
        transformer_engine.delaying_modules(layer)
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize(
    ('options', 'hooks', 'said'),
    [
        ({'parameters_split': ('query', 'key')}, [], 'parameters_split'),
        ({}, [print], 'DistributedDataParallelConfig'),
    ],
)
def test_refused(te_ranks, options, hooks, said):
    assert all(said in message for message in te_ranks(2).run(refused, options, hooks))
    assert te_ranks(2).run(refused, {}, []) == [None, None]


def grouped_tensors():
    """Whether this release's GroupedLinear can use GroupedTensor, and what is said of one that
    does."""
    import inspect

    from transformer_engine.pytorch import GroupedLinear

    from megatron_zbpp.mcore.job.rules_table import GROUPED_VARIABLE
    from megatron_zbpp.mcore.layers import transformer_engine

    if 'use_grouped_tensor' not in inspect.signature(GroupedLinear.__init__).parameters:
        return False, None
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    assert not hasattr(GroupedTensor, 'update_usage'), 'it has: can W passes keep it now?'
    with mock.patch.dict(os.environ, {GROUPED_VARIABLE: '1'}):
        made = GroupedLinear(EXPERTS, HIDDEN, FFN, delay_wgrad_compute=True)
    assert made.use_grouped_tensor, 'the variable does nothing: need it be refused?'
    try:
        transformer_engine.delaying_modules(made)
    except NotImplementedError as error:
        return True, str(error)
    return True, None


def test_grouped_tensors_are_refused(te_ranks):
    """By the module; by Megatron's settings before the start, see test_refusals."""
    for known, said in te_ranks(1).run(grouped_tensors):
        assert not known or 'GroupedLinear uses GroupedTensor, which W passes cannot' in said


def test_userbuffers_are_refused():
    from megatron_zbpp.mcore.layers import transformer_engine

    config = SimpleNamespace(tp_comm_overlap=False)
    transformer_engine.delay_weight_gradients(config)
    assert config.delay_wgrad_compute
    with pytest.raises(NotImplementedError, match=r'userbuffers.*--tp-comm-overlap'):
        transformer_engine.delay_weight_gradients(SimpleNamespace(tp_comm_overlap=True))


def registrations():
    """Hooks that are made, and walks over parameters, in a second iteration."""
    from megatron_zbpp.mcore.layers import transformer_engine
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

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
    return counts


def test_hooks_are_registered_once(te_ranks):
    """Of 64 experts in each of 16 layers they were most of a B's time on the host."""
    assert te_ranks(1).run(registrations) == [[(0, 0, 0)] * 2]


class Hidden:
    """A layer that `modules()` does not find, such as those of Transformer Engine's op fuser."""

    def __init__(self, layer):
        self.layer = layer


def incomplete(hidden, store_runs):
    """What is said after an iteration with a layer that is hidden, or whose W does not run."""
    from megatron_zbpp.mcore.iteration.batch import every_weight_gradient
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    store = WeightGradStore()
    layers, delaying = two_layers(store)
    if hidden:
        from transformer_engine.pytorch import Linear

        layers.hidden = Hidden(Linear(4, 4, delay_wgrad_compute=True, params_dtype=torch.float32))
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


def test_every_weight_gets_its_gradient(te_ranks):
    """A layer that took no part, here the second, may have none."""
    run = te_ranks(1).run
    assert run(incomplete, False, True) == [None]
    (said,) = run(incomplete, False, False)
    assert '0.weight, 0.bias' in said and '1.weight' not in said
    (said,) = run(incomplete, True, True)
    assert 'modules() does not find, from (2, 4) and (2, 4)' in said


def host_time(num_modules, experts, fused, rounds):
    """Seconds of our functions in a backward of GroupedLinear modules: the least of `rounds`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from transformer_engine.pytorch import GroupedLinear

    from megatron_zbpp.emulation import cpu
    from megatron_zbpp.mcore.layers import delayed_module, transformer_engine
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    make = {'bias': False, 'params_dtype': torch.float32, 'delay_wgrad_compute': True}
    make |= {'fuse_wgrad_accumulation': fused}
    layers = torch.nn.ModuleList(GroupedLinear(experts, 16, 16, **make) for _ in range(num_modules))
    config, store, taken = layer_config('fp32', 'LayerNorm', fused), WeightGradStore(), []
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layers)
    with contextlib.ExitStack() as timers:
        of = delayed_module.DelayedModule
        names = ('put', 'early', 'defer', 'delays')
        spent = [timers.enter_context(timed(of, name)) for name in names]
        delaying = transformer_engine.Delaying(model, store)
        for _ in range(rounds):
            with store.scope((0, 0)):
                y = torch.ones(experts, 16, device='cuda').requires_grad_()
                for layer in layers:
                    y = layer(y, [1] * experts)
            store.open((0, 0))
            for each in spent:
                each[:] = [0, 0]
            with model.no_sync(), store.scope((0, 0)), cpu.untranslated(), delaying.queueing():
                y.sum().backward()
            assert [calls for calls, _ in spent[:3]] == [num_modules] * 3, 'a B calls them'
            # of hooks there are too many to time each
            with cpu.untranslated():
                start = time.thread_time()
                for _ in range(0 if fused else num_modules * experts):
                    delayed_module._unshared(y)
                hooks = time.thread_time() - start
            taken.append(hooks + sum(seconds for _, seconds in spent))
            store.run((0, 0))
    forget_groups()
    return min(taken)


@contextlib.contextmanager
def timed(owner, name):
    """How often the function was called, and seconds in it."""
    original, spent = getattr(owner, name), [0, 0]

    @functools.wraps(original)
    def measured(*arguments):
        start = time.thread_time()
        result = original(*arguments)
        spent[0] += 1
        spent[1] += time.thread_time() - start
        return result

    with mock.patch.object(owner, name, measured):
        yield spent


@pytest.mark.skipif(CUDA, reason='backwards run on another thread')
@pytest.mark.parametrize('fused', [True, False])
def test_experts_cost_the_host_little(te_ranks, fused):
    """16 modules of 64 experts: hooks that each backward would make anew took 24 ms."""
    assert te_ranks(1).run(host_time, 16, 64, fused, 8)[0] < 2e-3
