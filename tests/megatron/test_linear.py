"""Megatron's linear layers, split: gradients as from its own backward, to the bit."""

import gc
import importlib
import inspect
import types
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from example import forget_groups, small_config
from gpu import CUDA
from stock import same
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_zbpp
from megatron_zbpp.mcore.layers.linear import deferring_linear
from megatron_zbpp.runtime.weight_grads import WeightGradStore

pytestmark = pytest.mark.on_ranks(2)
CASES = ['plain', 'bias', 'fused', 'fused-flagged', 'sequence-parallel', 'frozen-bias']


def fused_kernels():
    """What apex's extension does, by the same product that unfused code computes."""

    def accumulate(total_input, grad_output, main_grad):
        main_grad.add_(grad_output.t().matmul(total_input))

    return types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)


def layer_gradients(case, split, dtype_name, apex):
    """Gradients of three microbatches through a column-parallel and a row-parallel layer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import layers

    dtype = getattr(torch, dtype_name)
    sequence_parallel, size = case == 'sequence-parallel', dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    sizes = {'tensor_model_parallel_size': size, 'sequence_parallel': sequence_parallel}
    config = small_config(heads=2, params_dtype=dtype, **sizes)
    config.gradient_accumulation_fusion = case.startswith('fused')
    make = {'config': config, 'init_method': config.init_method, 'bias': 'bias' in case}
    with mock.patch.object(layers, '_grad_accum_fusion_available', True):
        column = layers.ColumnParallelLinear(8, 12, gather_output=False, **make)
        row = layers.RowParallelLinear(12, 8, input_is_parallel=True, skip_bias_add=False, **make)
    parameters = [*column.parameters(), *row.parameters()]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        if case == 'fused-flagged':  # as DDP marks them
            parameter.grad_added_to_main_grad = False
    if case == 'frozen-bias':
        column.bias.requires_grad_(False)
    name = 'fused_weight_gradient_mlp_cuda'
    kernels = importlib.import_module(name) if apex else fused_kernels()
    input_gradients = []
    replaced = mock.patch.object(layers, name, kernels, create=True)
    with replaced, megatron_zbpp.enable('zb-h1') as plugin:
        store = plugin.session.store
        for microbatch in range(3):
            rows = 4 // size if sequence_parallel else 4
            x = torch.randn(rows, 2, 8, dtype=dtype, device='cuda').requires_grad_()
            with store.scope((0, microbatch) if split else None):
                loss = (row(torch.tanh(column(x)[0]))[0].float() ** 2).sum()
            if split:
                store.open((0, microbatch))
            with store.scope((0, microbatch) if split else None):
                loss.backward()
            input_gradients.append(x.grad)
            if split and sequence_parallel:
                # each layer's operands; of those that are gathered, this rank's rows
                itemsize = x.element_size()
                assert store.held((0, microbatch)) == itemsize * 2 * (2 * 8 + 4 * 6 + 4 * 6 + 2 * 8)
        if split:
            # the row-parallel layer's bias is added outside of the product: its gradient is B's
            later = parameters[:-1] if 'bias' in case else parameters
            assert all(p.grad is None for p in later), 'B has touched a parameter'
            assert not any(p.main_grad.any() for p in later), 'B has touched main_grad'
            for microbatch in range(3):
                store.run((0, microbatch))
    flags = [getattr(p, 'grad_added_to_main_grad', None) for p in parameters]
    results = [(None if p.grad is None else p.grad.clone(), p.main_grad) for p in parameters]
    forget_groups()
    if case == 'fused-flagged':  # the gradients are placeholders, never read
        results = [(None, main_grad) for _, main_grad in results]
    return input_gradients, results, flags


def compare(case, dtype_name, apex=False):
    """On each rank: whether everything is the same, whole and split."""
    whole, split = (layer_gradients(case, each, dtype_name, apex) for each in (False, True))
    computed = sum(bool((g is not None and g.any()) or m.any()) for g, m in whole[1])
    return same(whole, split), computed


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', CASES)
def test_gradients_to_the_bit(ranks, case, dtype):
    computed = {'bias': 4, 'frozen-bias': 3}.get(case, 2)
    assert ranks(2).run(compare, case, dtype) == [(True, computed)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason='needs an NVIDIA GPU')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', ['fused', 'fused-flagged'])
def test_kernels_of_apex(ranks, case, dtype):
    pytest.importorskip('fused_weight_gradient_mlp_cuda', reason='needs apex with its extensions')
    assert ranks(1).run(compare, case, dtype, True) == [(True, 2)]


@contextmanager
def group_of_this_rank():
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    yield group
    dist.destroy_process_group(group)


@contextmanager
def on_this_rank():
    """Megatron's product of inputs and a weight, in a group of this rank alone."""
    from megatron.core.tensor_parallel import layers

    product = layers.linear_with_grad_accumulation_and_async_allreduce
    with group_of_this_rank() as group:
        yield lambda x, weight, fused=False: product(
            x, weight, None, fused, False, False, tp_group=group
        )


def products(split):
    """Kernels of a layer's forward and backward where the input's first stride is not the product
    of the others: of an embedding's output with micro batch 1, which RMSNorm passes on."""

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if str(function) in ('aten.mm.default', 'aten.bmm.default'):
                seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, key = [], (0, 0) if split else None
    weight = torch.nn.Parameter(torch.ones(3, 4))
    with on_this_rank() as linear, megatron_zbpp.enable('zb-h1') as plugin, Kernels():
        store = plugin.session.store
        x = torch.ones(1, 5, 4).transpose(0, 1).requires_grad_()
        with store.scope(key):
            y = linear(x, weight)
        store.open((0, 0))
        with store.scope(key):
            y.backward(torch.ones(5, 1, 1).expand(5, 1, 3))
        assert (weight.grad is None) == split
        store.run((0, 0))
    return seen, weight.grad.tolist()


def test_kernels_are_those_of_the_whole_backward(ranks):
    """Torch chooses by the weight's requires_grad: another kernel has other last bits."""
    whole, split = (ranks(2).run(products, each) for each in (False, True))
    assert split == whole
    assert len(whole[0][0]) == 3


@pytest.mark.parametrize('wanted', ['all', 'input', 'penalty'])
def test_a_backward_inside_a_forward_is_refused(wanted):
    """No W would follow; and of a layer whose weight gradient waits nobody could ask for it."""
    weight, x = torch.nn.Parameter(torch.ones(3, 4)), torch.ones(2, 4, requires_grad=True)
    with (
        on_this_rank() as linear,
        megatron_zbpp.enable('zb-h1') as plugin,
        plugin.session.store.scope((1, 0, 0)),
    ):
        y = linear(x, weight)
        with pytest.raises(NotImplementedError, match=r'(?s)^a backward inside a forward.*1f1b'):
            if wanted == 'all':
                y.sum().backward()
            else:
                torch.autograd.grad(y.sum(), x, create_graph=wanted == 'penalty')
    assert weight.grad is None


@pytest.mark.parametrize('backward', [False, True])
@pytest.mark.parametrize('forward', [False, True])
def test_autocast_is_as_in_forward(forward, backward):
    """Whether autocast is on for CUDA where a W computes, as in Megatron's own backward."""
    from megatron.core.tensor_parallel import layers

    seen = []

    def accumulate(total_input, grad_output, main_grad):
        seen.append(torch.is_autocast_enabled('cuda'))

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.main_grad = torch.zeros(3, 4)
    with (
        mock.patch.object(layers, 'fused_weight_gradient_mlp_cuda', kernels, create=True),
        on_this_rank() as linear,
        megatron_zbpp.enable('zb-h1') as plugin,
    ):
        store = plugin.session.store
        for key in (None, (0, 0)):
            x = torch.ones(2, 4, requires_grad=True)
            with store.scope(key), torch.autocast('cuda', torch.bfloat16, enabled=forward):
                y = linear(x, weight, fused=True)
            store.open((0, 0))
            with torch.autocast('cuda', torch.bfloat16, enabled=backward):
                with store.scope(key):
                    y.sum().backward()
                store.run((0, 0))
    assert seen == [forward, forward]


def test_backward_frees_the_graph():
    """What a B leaves: the layer's input and the gradient of its output, nothing else."""
    weight = torch.nn.Parameter(torch.ones(3, 4))
    with on_this_rank() as linear, megatron_zbpp.enable('zb-h1') as plugin:
        with plugin.session.store.scope((0, 0)):
            x = torch.ones(2, 4, requires_grad=True) * 2
            y = linear(x, weight)
            node, z = weakref.ref(y.grad_fn), y * 3
        plugin.session.store.open((0, 0))
        with plugin.session.store.scope((0, 0)):
            z.sum().backward()
        kept = weakref.ref(x.untyped_storage())
        del x, y, z
        gc.collect()
        graph_gone, input_kept = node() is None, kept() is not None
        plugin.session.store.run((0, 0))
    assert graph_gone and input_kept and weight.grad.tolist() == [[12.0] * 4] * 3


def test_what_a_later_release_adds_changes_nothing():
    """Where it gives the layer one argument more the weight gradient waits for W: in 0.20 it did
    not, and nobody saw it."""
    from megatron.core.tensor_parallel import layers

    original = layers.LinearWithGradAccumulationAndAsyncCommunication
    forward = inspect.signature(original.forward)
    more = [*forward.parameters.values(), inspect.Parameter('new', inspect.Parameter.KEYWORD_ONLY)]

    class Longer(original):
        @staticmethod
        def forward(ctx, *args):
            return original.forward(ctx, *args[:-1])

        @staticmethod
        def backward(ctx, gradient):
            return *original.backward(ctx, gradient), None

    Longer.forward.__signature__ = forward.replace(parameters=more)
    store, weight = WeightGradStore(), torch.nn.Parameter(torch.ones(3, 4))
    with group_of_this_rank() as group:
        given = dict.fromkeys(('grad_output_buffer', 'output_dtype'))
        given |= {'tp_group': group, 'gtp_remat_size': 1, 'wgrad_deferral_limit': 0}
        flags = [given.get(name, False) for name in [*forward.parameters][4:]]
        with store.scope((0, 0)):
            x = torch.ones(2, 4, requires_grad=True)
            y = deferring_linear(Longer, store).apply(x, weight, None, *flags, None)
        store.open((0, 0))
        with store.scope((0, 0)):
            y.sum().backward()
    assert len(store._pending[0, 0]) == 1 and weight.grad is None
