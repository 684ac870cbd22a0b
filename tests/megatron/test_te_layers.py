"""Layers of Transformer Engine, split into B and W: gradients as of TE's own backward.

TE's own modules: with their kernels on a GPU, with emulated ones elsewhere.
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
from defined import Seen, watch
from example import forget_groups
from gpu import CUDA
from grids import grid

pytestmark = [pytest.mark.te, *([pytest.mark.gpu] if CUDA else [])]

HIDDEN, FFN, EXPERTS = 32, 48, 3
# rows that each expert gets of a microbatch
TOKENS = ((16, 32, 16), (64, 0, 0), (16, 16, 32))
# in which order the W passes of three microbatches run; 'at once': their B has no W
ORDERS = {'in order': (0, 1, 2), 'out of order': (1, 2, 0), 'at once': (0, 1, 2)}


# modules of TE (None), and Megatron's around them with their own options
KINDS = {
    'LayerNormMLP': None,
    'Linear': None,
    'TEColumnParallelLinear': {'gather_output': False},
    'GroupedLinear': None,
    'TEColumnParallelGroupedLinear': {},
    'TERowParallelLinear': {'input_is_parallel': True},
    'TERowParallelGroupedLinear': {},
    'LayerNormLinear': None,
    'TELayerNormColumnParallelLinear': {'gather_output': False},
}
NORMS = ('LayerNorm', 'RMSNorm')
ACTIVATIONS = ('gelu', 'swiglu', 'srelu', 'geglu', 'reglu', 'relu', 'qgelu')
# kind, then norm and activation where it has them
LAYERS = (
    *(f'LayerNormMLP {norm} {activation}' for norm in NORMS for activation in ACTIVATIONS),
    *(kind for kind in KINDS if 'Norm' not in kind),
    *(
        f'{kind} {norm}'
        for kind in KINDS
        if kind.endswith('Linear') and 'Norm' in kind
        for norm in NORMS
    ),
)
SETTINGS = ('plain', 'bias', 'fused', 'fused bias')


def module_of(kind, config, bias, activation=None):
    """One module of a kind; of TE's own with the options that Megatron's would give it."""
    sizes = (EXPERTS, HIDDEN, FFN) if 'Grouped' in kind else (HIDDEN, FFN)
    if KINDS[kind] is not None:
        from megatron.core.extensions import transformer_engine as megatrons

        return getattr(megatrons, kind)(
            *sizes,
            config=config,
            init_method=config.init_method,
            bias=bias,
            skip_bias_add=False,
            is_expert='Grouped' in kind,
            **KINDS[kind],
        )
    from transformer_engine import pytorch

    own = {'normalization': config.normalization} if 'Norm' in kind else {}
    own |= {'activation': activation} if activation else {}
    return getattr(pytorch, kind)(
        *sizes,
        bias=bias,
        params_dtype=config.params_dtype,
        fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
        delay_wgrad_compute=config.delay_wgrad_compute,
        **own,
    )


def layer_config(dtype, norm, fused):
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        normalization=norm,
        params_dtype=torch.float32 if dtype == 'fp32' else torch.bfloat16,
        bf16=dtype != 'fp32',
    )
    config.gradient_accumulation_fusion = fused
    return config


def precision(dtype):
    if not dtype.startswith('fp8'):
        return contextlib.nullcontext()
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
    from transformer_engine.pytorch import fp8_autocast

    recipe = DelayedScaling(reduce_amax=False) if 'delayed' in dtype else Float8CurrentScaling()
    return fp8_autocast(enabled=True, fp8_recipe=recipe)


def call(kind, model, x, microbatch):
    output = model(x, list(TOKENS[microbatch])) if 'Grouped' in kind else model(x)
    output, bias = output if isinstance(output, tuple) else (output, None)
    return output if bias is None else output + bias


def layer_gradients(split, order, layer, dtype, setting, overlap):
    """Gradients of three microbatches through one layer in DistributedDataParallel.

    Args:
        split: whether the layer leaves its weight gradients.
        order: a key of ORDERS; without a split, that of the backwards.

    Returns:
        For each of two iterations those of the inputs, those of parameters by name after the last
        B, and at the end.
    """
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    import megatron_zbpp
    from megatron_zbpp.mcore.patches import transformer_engine

    kind, norm, *activation = (*layer.split(), 'LayerNorm')[: max(2, len(layer.split()))]
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = layer_config(dtype, norm, 'fused' in setting)
    if split:
        transformer_engine.delay_weight_gradients(config)
    made = module_of(kind, config, 'bias' in setting, *activation).cuda()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    model = DistributedDataParallel(config, ddp, made)
    seen = watch(model, Seen())
    store = megatron_zbpp.enable('zb-h1').session.store
    torch.manual_seed(2 + torch.distributed.get_rank())
    found = [iteration(kind, model, store, split, order, dtype, config.params_dtype) for _ in '12']
    if split and order != 'at once':  # there TE 2.8 itself gives none for FP8 weights of an MLP
        assert not seen.undefined, f'autograd got None for {seen.undefined}'
    return found


def iteration(kind, model, store, split, order, dtype, params_dtype):
    """One global batch, as the executor runs it."""
    from megatron_zbpp.mcore.patches import transformer_engine

    model.zero_grad_buffer()
    for module in model.modules():
        if hasattr(module, 'is_first_microbatch'):  # as Megatron sets it; it asks for W in order
            module.is_first_microbatch = order != 'out of order'
    delaying = transformer_engine.Delaying(model, store)
    assert bool(delaying.modules) == split
    defers = split and order != 'at once'
    inputs = [
        torch.randn(sum(TOKENS[k]), HIDDEN, dtype=params_dtype, device='cuda').requires_grad_()
        for k in range(3)
    ]
    outputs = []
    for k, x in enumerate(inputs):
        with store.scope((0, k) if defers else None), precision(dtype):
            outputs.append(call(kind, model, x, k))
    backwards = range(3) if split else ORDERS[order]
    for k in backwards:
        if defers:
            store.open((0, k))
        last = k == backwards[-1]
        with (
            store.scope((0, k) if defers else None),
            grad_sync(model, last),
            delaying.queueing(),
        ):
            outputs[k].float().square().mean().backward()
    before = grads(model)
    for k in ORDERS[order] if defers else ():
        with grad_sync(model, k == ORDERS[order][-1]):
            store.run((0, k))
    assert not store.pending
    model.finish_grad_sync()
    return [x.grad.cpu() for x in inputs], before, grads(model)


def grad_sync(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def grads(model):
    """By name; those of weights in fp32, where the optimizer reads them."""
    assert all(parameter.grad is None for parameter in model.parameters())
    return {
        name.rpartition('module.')[2]: parameter.main_grad.cpu().clone()
        for name, parameter in model.named_parameters()
    }


def compare(order, *case):
    """On each rank: what differs between TE's own backward and the split one."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    split = layer_gradients(True, order, *case)
    whole = layer_gradients(False, order, *case)
    in_order = layer_gradients(False, 'in order', *case)
    wrong = []
    for mine, theirs, norms in zip(split, whole, in_order, strict=True):
        if not all(map(torch.equal, mine[0], theirs[0])):
            wrong.append('gradient of the input')
        assert mine[2].keys() == theirs[2].keys()
        for name, gradient in mine[2].items():
            # norms' gradients come with B, and those of biases that TE fuses into other kernels
            in_b = 'layer_norm' in name or ('bias' in name and mine[1][name].any())
            expected = (norms if in_b else theirs)[2][name]
            assert expected.any(), name
            if not torch.equal(gradient, expected):
                wrong.append(name)
            waits = 'layer_norm' not in name and order != 'at once'
            if waits and 'bias' not in name and mine[1][name].any():
                wrong.append(f'{name} did not wait for W')
    return wrong


@pytest.fixture(scope='module')
def layer_ranks(te_ranks):
    """Two ranks, with Megatron's groups for all tests here."""
    chosen = te_ranks(2)
    yield chosen
    chosen.run(forget_groups)


def runs_whole(layer, setting, order, dtype, overlap):
    """TE 2.8's own LayerNormMLP gives no gradient of its FP8 weights when it has fused them.

    Scales of delayed scaling come from the backwards before: another order of them, other scales.
    """
    if dtype == 'fp8 delayed' and order == 'out of order':
        return False
    fp8 = dtype.startswith('fp8')
    return not ('LayerNormMLP' in layer and fp8 and 'fused' in setting and overlap)


@grid(
    runs_whole,
    layer=LAYERS,
    setting=SETTINGS,
    order=tuple(ORDERS),
    dtype=('bf16', 'fp32', 'fp8', 'fp8 delayed', 'bf16', 'fp32'),
    overlap=(False, True),
)
def test_gradients_to_the_bit(layer_ranks, layer, setting, order, dtype, overlap):
    if CUDA and 'fp8' in dtype and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip('this GPU has no FP8')
    assert not any(layer_ranks.run(compare, order, layer, dtype, setting, overlap))


def parallel_gradients(split, kind, dtype):
    """As `layer_gradients`, with tensor and sequence parallelism, and without fusion.

    Returns:
        Gradients by name, and bytes that waited for each W.
    """
    from megatron.core import tensor_parallel

    from megatron_zbpp.mcore.patches import transformer_engine
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = layer_config(dtype, 'LayerNorm', False)
    config.tensor_model_parallel_size, config.sequence_parallel = 2, True
    if split:
        transformer_engine.delay_weight_gradients(config)
    layer, store = module_of(kind, config, True).cuda(), WeightGradStore()
    delaying = transformer_engine.Delaying(layer, store)
    torch.manual_seed(2 + torch.distributed.get_rank())
    rows, columns = (ROWS, HIDDEN // 2) if 'Row' in kind else (ROWS // 2, HIDDEN)
    held = []
    for k in range(3):
        x = torch.randn(rows, 1, columns, dtype=config.params_dtype, device='cuda')
        with store.scope((0, k) if split else None), precision(dtype):
            output, _ = layer(x.requires_grad_())
        if split:
            store.open((0, k))
        with store.scope((0, k) if split else None), delaying.queueing():
            output.float().square().mean().backward()
        if split:
            held.append(store.held((0, k)))
    for k in range(3) if split else ():
        store.run((0, k))
    return {name: p.grad for name, p in layer.named_parameters()}, held


def parallel(dtype):
    """By kind: what differs between whole and split, and bytes that waited for W."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        forget_groups()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = {}
    try:
        for kind in PARALLEL:
            (whole, _), (split, held) = (parallel_gradients(s, kind, dtype) for s in (False, True))
            assert whole.keys() == split.keys()
            found[kind] = [n for n in whole if not torch.equal(whole[n], split[n])], held
    finally:
        forget_groups()
    return found


ROWS = 64  # of a microbatch
# of which tensor sequence parallelism splits the rows, and of which tensor parallelism the columns
PARALLEL = {
    'TEColumnParallelLinear': (HIDDEN, FFN),
    'TELayerNormColumnParallelLinear': (HIDDEN, FFN),
    'TERowParallelLinear': (FFN, HIDDEN),
}


@pytest.mark.parametrize('dtype', ['bf16', 'fp8'])
def test_sequence_parallelism(te_ranks, dtype):
    """What B gathers waits as each rank's own rows, FP8 without data that W does not read."""
    for found in te_ranks(2).run(parallel, dtype):
        for kind, (differ, held) in found.items():
            assert not differ, kind
            size = 2 if dtype == 'bf16' else 1
            shards = 2 if dtype == 'bf16' else 1  # of the tensor that is gathered
            gathered, own = PARALLEL[kind]
            expected = size * ROWS * (gathered // shards + own // 2)
            assert all(expected <= bytes <= expected + 64 for bytes in held), (kind, held, expected)


def two_layers(store, of=(4, 4), **options):
    """Two layers of TE without DistributedDataParallel, and what delays in them."""
    from transformer_engine.pytorch import Linear

    from megatron_zbpp.mcore.patches import transformer_engine

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
        assert 'Linear put off its weight gradient' in said


def refused(options, hooks):
    """What is said of such a layer."""
    from transformer_engine.pytorch import Linear

    from megatron_zbpp.mcore.patches import transformer_engine

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

    from megatron_zbpp.mcore.patches import transformer_engine
    from megatron_zbpp.mcore.refusals import GROUPED_VARIABLE

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
    from megatron_zbpp.mcore.patches import transformer_engine

    config = SimpleNamespace(tp_comm_overlap=False)
    transformer_engine.delay_weight_gradients(config)
    assert config.delay_wgrad_compute
    with pytest.raises(NotImplementedError, match=r'userbuffers.*--tp-comm-overlap'):
        transformer_engine.delay_weight_gradients(SimpleNamespace(tp_comm_overlap=True))


def registrations():
    """Hooks that are made, and walks over parameters, in a second iteration."""
    from megatron_zbpp.mcore.patches import transformer_engine
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
    from megatron_zbpp.mcore.iteration.completeness import every_weight_gradient
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
    from megatron_zbpp.mcore.patches import transformer_engine
    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    make = {'bias': False, 'params_dtype': torch.float32, 'delay_wgrad_compute': True}
    make |= {'fuse_wgrad_accumulation': fused}
    layers = torch.nn.ModuleList(GroupedLinear(experts, 16, 16, **make) for _ in range(num_modules))
    config, store, taken = layer_config('fp32', 'LayerNorm', fused), WeightGradStore(), []
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layers)
    with contextlib.ExitStack() as timers:
        of = transformer_engine.module.DelayedModule
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
                    transformer_engine.aliases._unshared(y)
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
