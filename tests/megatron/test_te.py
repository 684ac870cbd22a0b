"""The adapter to Transformer Engine, against a module that keeps TE's contract."""

from __future__ import annotations

import queue

import pytest
import torch

from megatron_zbpp.runtime.store import WeightGradStore


class Product(torch.autograd.Function):
    """Input gradient at once; the weight gradient into the module's own queue."""

    @staticmethod
    def forward(ctx, module, x, weight):
        ctx.module = module
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.module.wgrad_store.context.put((x, gradient))
        return None, gradient @ weight.t(), None


class Store:
    """TE's WeightGradStore as the adapter sees it."""

    def __init__(self):
        self.context = queue.Queue()

    def delay_wgrad_compute(self):
        return True


class Linear(torch.nn.Module):
    """TE's Linear as the adapter sees it: `backward_dw` overwrites .grad."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.layer_norm_weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
        self.weight.main_grad = torch.zeros(3, 4)
        self.bias = torch.nn.Parameter(torch.zeros(4))
        self.wgrad_store = Store()

    def forward(self, x):
        return Product.apply(self, x * self.layer_norm_weight, self.weight)

    def backward_dw(self):
        x, gradient = self.wgrad_store.context.get()
        if self.fused:
            self.weight.main_grad += x.t() @ gradient
        else:
            self.weight.grad = x.t() @ gradient
        if self.bias.grad is None:
            self.bias.grad = gradient.sum(0)


def run_adapter(fused):
    """Three microbatches through a stand-in; gradients by the adapter and by plain autograd."""
    from megatron_zbpp.mcore import te

    module, store = Linear(fused), WeightGradStore()
    modules = te.delaying_modules(torch.nn.Sequential(module, torch.nn.Linear(2, 2)))
    assert modules == [module]
    inputs = [torch.full((2, 3), k + 1.0, requires_grad=True) for k in range(3)]
    for k, x in enumerate(inputs):
        store.open((0, k))
        with store.scope((0, k)):
            module(x).sum().backward()
            te.defer_queued(modules, store)
    assert module.weight.grad is None and not module.weight.main_grad.any()
    norm_gradient = module.layer_norm_weight.grad.clone()
    for k in range(3):
        store.run((0, k))
    assert torch.equal(module.layer_norm_weight.grad, norm_gradient), 'that one comes with B'
    weight = module.weight.detach().clone().requires_grad_()
    for x in inputs:
        (x.detach() * module.layer_norm_weight.detach() @ weight).sum().backward()
    found = module.weight.main_grad if fused else module.weight.grad
    assert torch.equal(found, weight.grad)
    assert torch.equal(module.bias.grad, torch.full((4,), 6.0))


@pytest.mark.parametrize('fused', [False, True])
def test_queued_gradients_run_with_w(ranks, fused):
    ranks(2).run(run_adapter, fused)


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
