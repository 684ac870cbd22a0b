"""The weight-gradient store by itself: gradients as autograd would have accumulated them."""

import functools
from contextlib import contextmanager

import torch

from megatron_zbpp.runtime.weight_grads import WeightGradStore


@contextmanager
def backward(store, microbatch=0):
    """Of a stage and a microbatch, in which layers defer."""
    store.open((0, microbatch))
    with store.scope((0, microbatch)):
        yield


def test_gradients_arrive_through_autograd():
    """Hooks on the parameter see a gradient at W, not before; it accumulates."""
    store, weight = WeightGradStore(), torch.nn.Parameter(torch.zeros(2))
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for microbatch in range(2):
        with backward(store, microbatch):
            assert store.deferring
            store.defer([weight], lambda k=microbatch: [torch.full((2,), k + 1.0)])
        assert not store.deferring
    assert store.pending == 2 and weight.grad is None and not seen
    store.run((0, 0))
    assert weight.grad.tolist() == [1, 1] and store.pending == 1
    store.run((0, 1))
    assert weight.grad.tolist() == [3, 3] and len(seen) == 2 and not store.pending


def test_shared_parameter_accumulates_once():
    """Two uses in one microbatch add up first, as in one backward."""
    store, weight = WeightGradStore(), torch.nn.Parameter(torch.zeros(1))
    hooks = []
    weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad.item()))
    with backward(store):
        store.defer([weight], lambda: [torch.ones(1)])
        store.defer([weight], lambda: [torch.full((1,), 2.0)])
    store.run((0, 0))
    assert hooks == [3.0]


def test_communication_starts_one_layer_ahead():
    """And of what waits, several layers' shares of one tensor count once."""
    store = WeightGradStore()
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    events, shared = [], torch.zeros(10)

    def compute(layer):
        events.append(f'compute {layer}')
        return [torch.ones(1)]

    with backward(store):
        for layer, weight in enumerate(weights):
            start = None if layer == 1 else lambda layer=layer: events.append(f'start {layer}')
            held = [shared[layer:], torch.zeros(layer)]
            run = functools.partial(compute, layer)
            store.defer([weight], run, functools.partial(iter, held), start)
    assert store.held((0, 0)) == 4 * (10 + 0 + 1 + 2)
    store.run((0, 0))
    assert events == ['start 0', 'compute 0', 'start 2', 'compute 1', 'compute 2']


def test_gradient_that_a_fused_kernel_has_added():
    """None for a parameter: its gradient is where it belongs already."""
    store = WeightGradStore()
    weight, bias = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    with backward(store):
        store.defer([weight, bias], lambda: [None, torch.ones(1)])
    store.run((0, 0))
    assert weight.grad is None and bias.grad.item() == 1


def test_stage_without_deferred_layers_and_clear():
    store = WeightGradStore()
    store.open((0, 0))
    store.run((0, 0))
    store.open((0, 1))
    store.clear()
    assert not store.pending


def test_gradients_that_are_left_out():
    """The others arrive as ever; hooks are called for all, with a gradient where they want one."""

    def dropped(parameter, fused):
        assert not fused
        return torch.zeros_like(parameter)

    for shown in (False, True):
        store = WeightGradStore()
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
        store.left_out = lambda key, count: {1} if key == (0, 1) and count == 3 else ()
        store.dropped, called = dropped if shown else None, []
        accumulators = [w.expand_as(w).grad_fn.next_functions[0][0] for w in weights]
        for weight, accumulator in zip(weights, accumulators, strict=True):
            # as DistributedDataParallel sees them, which takes what is in `.grad` each time
            def hook(*_, weight=weight, called=called):
                called.append(None if weight.grad is None else weight.grad.tolist())
                weight.grad = None

            accumulator.register_hook(hook)
        for microbatch in range(3):
            with backward(store, microbatch):
                for weight in weights:
                    store.defer([weight], lambda k=microbatch: [torch.full((2,), k + 1.0)])
            store.run((0, microbatch))
        nothing = [0, 0] if shown else None
        assert called == [[1, 1]] * 3 + [[2, 2], nothing, [2, 2]] + [[3, 3]] * 3
