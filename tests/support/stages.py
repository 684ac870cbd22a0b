"""Small stages without Megatron, and a plain reference for them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from megatron_zbpp.ir import F, Pass

WIDTH, ROWS = 6, 3


class DeferredLinear(torch.autograd.Function):
    """y = x w, with the gradient of w left to the store if it defers."""

    @staticmethod
    def forward(ctx, store, weight, x, alias):
        ctx.store, ctx.weight = store, weight
        ctx.save_for_backward(x, alias)
        return x @ alias

    @staticmethod
    def backward(ctx, gradient):
        x, alias = ctx.saved_tensors
        ctx.store.defer([ctx.weight], lambda: [x.t() @ gradient])
        return None, None, gradient @ alias.t(), None


class LinearStage(torch.nn.Module):
    """tanh(x w) with a bias whose gradient comes with B; the last stage returns a loss."""

    def __init__(self, store, stage, num_stages, rows=lambda microbatch: ROWS):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.store, self.first, self.last = store, stage == 0, stage == num_stages - 1
        self.rows = rows  # of each microbatch
        self.complete = None  # the gradients, when they were said to be complete
        self._losses = []
        self.ran = []  # forwards of which nothing was saved, and those that ran again

    def forward(self, p, received):
        x = received
        if self.first:
            x = torch.full(
                (self.rows(p.microbatch), WIDTH), 0.1 * (p.microbatch + 1), device=self.bias.device
            )
        x = x + self.bias
        if self.store is not None and self.store.deferring:
            y = DeferredLinear.apply(self.store, self.weight, x, self.weight.detach())
        else:
            y = x @ self.weight
        if not self.last:
            return torch.tanh(y)
        loss = y.square().sum()
        self._losses.append(loss.detach())
        return loss

    @property
    def losses(self):
        """Of the microbatches so far; read once they have run, so that no pass waits for them."""
        return [loss.item() for loss in self._losses]

    def forward_unsaved(self, p, received):
        self.ran = [*self.ran, ('F', p.microbatch)]
        with torch.no_grad():
            return self.forward(p, received)

    def recompute(self, p, received):
        self.ran = [*self.ran, ('R', p.microbatch)]
        output = self.forward(p, received)
        if self.last:
            self._losses.pop()
        return output

    def backward(self, p, received, output, gradient):
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    def release(self, output):
        pass

    @contextmanager
    def grad_sync(self, last):
        yield
        if last:
            self.complete = tuple(p.grad.clone() for p in self.parameters() if p.grad is not None)


def uneven(microbatch):
    """Rows of microbatches that differ."""
    return ROWS + 7 * microbatch % 4


def reference(num_stages, num_microbatches, train=True, rows=lambda microbatch: ROWS):
    """Losses and gradients of the whole model on one process, microbatch by microbatch."""
    stages = [LinearStage(None, stage, num_stages, rows) for stage in range(num_stages)]
    for microbatch in range(num_microbatches):
        with nullcontext() if train else torch.no_grad():
            value = None
            for index, stage in enumerate(stages):
                value = stage(Pass(F, index, microbatch), value)
        if train:
            value.backward()
    gradients = [tuple(p.grad for p in stage.parameters()) for stage in stages]
    return stages[-1].losses, gradients
