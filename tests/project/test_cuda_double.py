"""The double of CUDA sees what it is there to see."""

from __future__ import annotations

import pytest
import torch
from cuda_double import GPU, Cuda

WAITING = {
    'item': lambda x: x.sum().item(),
    'bool': lambda x: bool(x.sum() > 0),
    'nonzero': lambda x: x.nonzero(),
    'mask': lambda x: x[x > 0],
    'values by mask': lambda x: x.__setitem__(x > 0, torch.ones(3, device='cuda')),
    'equal': lambda x: torch.equal(x, x),
    'to the host': lambda x: x.to('cpu'),
    'cpu': lambda x: x.cpu(),
    'tolist': lambda x: x.tolist(),
    'to the device': lambda x: torch.ones(3).to(x),
    'a copy from plain memory': lambda x: x.copy_(torch.ones(3), non_blocking=True),
    'a copy to plain memory': lambda x: torch.ones(3).copy_(x, non_blocking=True),
    'a blocking copy': lambda x: x.copy_(torch.ones(3, pin_memory=True)),
    'device': lambda x: torch.cuda.synchronize(),
    'stream': lambda x: torch.cuda.current_stream().synchronize(),
    'event': lambda x: torch.cuda.current_stream().record_event().synchronize(),
    'cache': lambda x: torch.cuda.empty_cache(),
    'in a backward': lambda x: Asking.apply(x.requires_grad_()).sum().backward(),
}
FREE = {
    'arithmetic': lambda x: (x @ x).add_(1).softmax(0),
    'indices': lambda x: x[torch.zeros(2, dtype=torch.long, device='cuda')],
    'a value by mask': lambda x: x.__setitem__(x > 0, 0.0),
    'the host alone': lambda x: torch.ones(3).sum().item(),
    'types': lambda x: x.to(torch.bfloat16).float(),
    'from page-locked memory': lambda x: torch.ones(3, pin_memory=True).to(x, non_blocking=True),
    'to page-locked memory': lambda x: x.to('cpu', non_blocking=True),
    'event': lambda x: torch.cuda.current_stream().record_event().query(),
    'backward': lambda x: (2 * x.requires_grad_()).sum().backward(),
}


class Asking(torch.autograd.Function):
    """Looks at its gradient."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient if gradient.sum() > 0 else gradient


@pytest.mark.parametrize('name', WAITING)
def test_waiting_is_seen(name):
    with Cuda() as cuda:
        x = torch.ones(3, device='cuda')
        with cuda.within('0F0'):
            WAITING[name](x)
    assert len(cuda.waits) == 1 and cuda.waits[0].endswith(' in 0F0'), cuda.waits


@pytest.mark.parametrize('name', FREE)
def test_nothing_else_waits(name):
    with Cuda() as cuda:
        FREE[name](torch.ones(3, device='cuda'))
    assert not cuda.waits and not cuda.races


def test_places():
    with Cuda():
        x = torch.ones(2, 2, device='cuda')
        assert x.is_cuda and x.device == torch.device('cuda', GPU) and not x.is_cpu
        assert all(t.is_cuda for t in (x + 1, x[0], x.t(), torch.zeros_like(x), x.new_empty(3)))
        assert torch.nn.Parameter(x).is_cuda
        assert not any(
            t.is_cuda for t in (torch.ones(1), x.to('cpu'), x.new_empty(3, device='cpu'))
        )
        assert torch.empty(1, pin_memory=True).is_pinned() and not torch.empty(1).is_pinned()
    assert not torch.cuda.is_available()
    assert not x.is_cuda and x.device.type == 'cpu', 'as if nothing had been'


ORDERS = {
    'not at all': ('race', lambda side: None),
    'for the stream': ('', lambda side: torch.cuda.current_stream().wait_stream(side)),
    'for an event': ('', lambda side: torch.cuda.current_stream().wait_event(side.record_event())),
    'by the host': ('', lambda side: torch.cuda.synchronize()),
}


@pytest.mark.parametrize('how', ORDERS)
def test_streams(how):
    expected, wait = ORDERS[how]
    with Cuda() as cuda:
        x, side = torch.ones(3, device='cuda'), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        wait(side)
        x.mul_(2)
    assert bool(cuda.races) == bool(expected), cuda.races


@pytest.mark.parametrize('waits', [True, False])
def test_page_locked_memory(waits):
    with Cuda() as cuda:
        pinned = torch.empty(3, pin_memory=True)
        pinned.copy_(torch.ones(3, device='cuda'), non_blocking=True)
        if waits:
            torch.cuda.current_stream().record_event().synchronize()
        pinned.sum()
    assert bool(cuda.races) == (not waits)
