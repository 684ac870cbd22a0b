"""The adapter to Transformer Engine, against modules that keep TE's contract.

The contract itself is read from TE's sources in test_te_sources.
"""

from __future__ import annotations

import queue

import pytest
import torch

from megatron_zbpp.runtime.store import WeightGradStore


class Products(torch.autograd.Function):
    """x @ w + b for each weight: input gradient at once; those of weights into the queue."""

    @staticmethod
    def forward(ctx, module, x, *parameters):
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        half = len(parameters) // 2
        return sum(x @ w + b for w, b in zip(parameters[:half], parameters[half:], strict=True))

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        module, weights = ctx.module, parameters[: len(parameters) // 2]
        for _ in range(module.entries):
            module.wgrad_store.context.put((x, gradient))
        shown = [None] * len(weights)
        if module.fused and hasattr(weights[0], 'main_grad'):
            for name, weight in zip(module.weights, weights, strict=True):
                own = getattr(module, name)
                if hasattr(own, 'grad_added_to_main_grad'):
                    own.grad_added_to_main_grad = True
                    shown[module.weights.index(name)] = torch.full_like(weight, float('nan'))
        biases = [gradient.sum(0) if module.fp8 else None] * len(weights)
        return None, sum(gradient @ w.t() for w in weights), *shown, *biases


class Store:
    """TE's WeightGradStore as the adapter sees it."""

    def __init__(self):
        self.context = queue.Queue()

    def delay_wgrad_compute(self):
        return True


class Module(torch.nn.Module):
    """TE's modules as the adapter sees them: `backward_dw` overwrites .grad.

    With FP8 the gradients of biases come with B, and W has none.
    """

    weights, biases, entries = ('weight',), ('bias',), 1

    def __init__(self, fused, fp8):
        super().__init__()
        self.fused, self.fp8 = fused, fp8
        self.layer_norm_weight = torch.nn.Parameter(torch.full((3,), 2.0))
        for k, name in enumerate(self.weights):
            weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4) + k)
            weight.main_grad = torch.zeros(3, 4)
            setattr(self, name, weight)
        for name in self.biases:
            setattr(self, name, torch.nn.Parameter(torch.zeros(4)))
        self.wgrad_store = Store()

    def forward(self, x):
        own = [getattr(self, name) for name in (*self.weights, *self.biases)]
        return Products.apply(self, x * self.layer_norm_weight, *own)

    def backward_dw(self):
        for _ in range(self.entries):
            x, gradient = self.wgrad_store.context.get_nowait()
        for weight in (getattr(self, name) for name in self.weights):
            if self.fused:
                weight.main_grad += x.t() @ gradient
            else:
                weight.grad = x.t() @ gradient
        for bias in (getattr(self, name) for name in self.biases):
            if bias.grad is None:
                bias.grad = (None if self.fp8 else gradient.sum(0)).to(bias.dtype)


class GroupedLinear(Module):
    weights, biases = ('weight0', 'weight1'), ('bias0', 'bias1')


class LayerNormMLP(Module):
    weights, biases, entries = ('fc1_weight', 'fc2_weight'), ('fc1_bias', 'fc2_bias'), 2


KINDS = {'Linear': Module, 'GroupedLinear': GroupedLinear, 'LayerNormMLP': LayerNormMLP}


def wrap(module, visits):
    """DistributedDataParallel's hooks with `overlap_grad_reduce`, as Megatron's."""
    keep = []
    for name, parameter in module.named_parameters():
        parameter.grad_added_to_main_grad = False
        parameter.main_grad = torch.zeros_like(parameter)

        def hook(*_, name=name, parameter=parameter):
            assert parameter.grad is not None, f'{name}.grad is None'
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            visits.append(name)

        keep.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        keep[-1].register_hook(hook)
    return keep


def found(parameter, distributed, fused):
    """The gradient of a parameter, wherever it is."""
    return parameter.main_grad if distributed or fused else parameter.grad


def run_adapter(kind, fused, fp8, distributed, defers):
    """Three microbatches; checks gradients against plain autograd."""
    from megatron_zbpp.mcore import te

    module, store, visits = KINDS[kind](fused, fp8), WeightGradStore(), []
    hooks = wrap(module, visits) if distributed else []
    modules = te.delaying_modules(torch.nn.Sequential(module, torch.nn.Linear(2, 2)))
    assert modules == [module]
    inputs = [torch.full((2, 3), k + 1.0, requires_grad=True) for k in range(3)]
    weights = [getattr(module, name) for name in module.weights]
    for k, x in enumerate(inputs):
        store.open((0, k))
        with store.scope((0, k) if defers else None):
            output = module(x).sum()
            with te.queueing(modules, store):
                output.backward()
    for weight in weights:
        has = found(weight, distributed, fused)
        assert (has is not None and bool(has.any())) != defers
        assert weight.grad is None or not distributed
    for k in range(3):
        store.run((0, k))
    check_gradients(module, inputs, distributed)
    assert module.wgrad_store.context.empty() and not store.pending
    if distributed:
        assert len(hooks) == len(set(visits))
        assert not any(p.grad_added_to_main_grad for p in module.parameters()) or fused
        assert all(p.grad is None for p in module.parameters())


def check_gradients(module, inputs, distributed):
    """They are those of plain autograd, each added once."""
    weights = [getattr(module, name).detach().clone().requires_grad_() for name in module.weights]
    norm = module.layer_norm_weight.detach().clone().requires_grad_()
    for x in inputs:
        sum(x.detach() * norm @ weight for weight in weights).sum().backward()
    for name, weight in zip(module.weights, weights, strict=True):
        assert torch.equal(found(getattr(module, name), distributed, module.fused), weight.grad)
    for name in module.biases:
        assert torch.equal(
            found(getattr(module, name), distributed, False), torch.full((4,), 6.0)
        ), name
    assert torch.equal(found(module.layer_norm_weight, distributed, False), norm.grad)


@pytest.mark.parametrize('defers', [True, False], ids=['W', 'at once'])
@pytest.mark.parametrize('distributed', [False, True], ids=['plain', 'DDP'])
@pytest.mark.parametrize('fp8', [False, True], ids=['bf16', 'fp8'])
@pytest.mark.parametrize('fused', [False, True], ids=['grad', 'main_grad'])
@pytest.mark.parametrize('kind', KINDS)
def test_queued_gradients(ranks, kind, fused, fp8, distributed, defers):
    ranks(2).run(run_adapter, kind, fused, fp8, distributed, defers)


def unused_in_one():
    """A module that one microbatch does not use, such as an expert without tokens."""
    from megatron_zbpp.mcore import te

    one, other, store = Module(False, False), Module(False, False), WeightGradStore()
    for k, used in enumerate([(one, other), (other,), (one, other)]):
        store.open((0, k))
        with store.scope((0, k)):
            loss = sum(module(torch.full((2, 3), k + 1.0)).sum() for module in used)
            with te.queueing([one, other], store):
                loss.backward()
    for k in range(3):
        store.run((0, k))
    assert one.wgrad_store.context.empty() and other.wgrad_store.context.empty()
    return one.bias.grad.tolist(), other.bias.grad.tolist()


def test_each_w_runs_what_its_b_queued(ranks):
    assert ranks(2).run(unused_in_one) == [([4.0] * 4, [6.0] * 4)] * 2


def refused(name, value):
    """What is said of a module with such an attribute."""
    from megatron_zbpp.mcore import te

    module = Module(False, False)
    setattr(module, name, value)
    try:
        te.delaying_modules(module)
    except NotImplementedError as error:
        return str(error)


@pytest.mark.parametrize(
    ('name', 'value', 'said'),
    [
        ('weight_names', ['query', 'key'], 'parameters_split'),
        ('wgrad_accumulation_and_reduce_hooks', [print], 'DistributedDataParallelConfig'),
    ],
)
def test_refused(ranks, name, value, said):
    assert all(said in message for message in ranks(2).run(refused, name, value))
    assert ranks(2).run(refused, name, value[1:]) == [None, None]


def delays(tp_comm_overlap):
    from types import SimpleNamespace

    from megatron_zbpp.mcore import te

    config = SimpleNamespace(tp_comm_overlap=tp_comm_overlap)
    try:
        te.delay_weight_gradients(config)
    except NotImplementedError as error:
        return str(error)
    return config.delay_wgrad_compute


def test_userbuffers_are_refused(ranks):
    assert ranks(2).run(delays, False) == [True, True]
    for message in ranks(2).run(delays, True):
        assert 'userbuffers' in message and '--tp-comm-overlap' in message
