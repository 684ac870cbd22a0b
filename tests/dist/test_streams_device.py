"""torch's own autograd engine on the recorded device: streams are ordered, and seeded races found.

In a process of its own: who has the device keeps it.
"""

import pytest
import torch
from recorded import device

from megatron_zbpp.runtime.weight_grads import WeightGradStore

pytestmark = pytest.mark.on_device


def seen(work, *args):
    """What `work` leaves in the log."""
    with device.recording() as order:
        work(*args)
    return [*map(str, order.races)], [wait.what for wait in order.waits]


def reads_on_another(how):
    made = torch.ones(4, device='cuda')
    stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
    if how == 'an event':
        stream.wait_event(main.record_event())
    elif how == 'the host':
        torch.cuda.synchronize()
    elif how:
        stream.wait_stream(main)
    with torch.cuda.stream(stream):
        read = made * 2
    torch.cuda.current_stream().wait_stream(stream)
    return read + made


def copies_out(late):
    """To page-locked memory, behind what computes it, or moved before."""
    made, host = torch.zeros(4, device='cuda'), torch.zeros(4).pin_memory()
    stream, computed = torch.cuda.Stream(), torch.cuda.Event()
    if not late:
        computed.record()
    made.add_(1)
    if late:
        computed.record()
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        host.copy_(made, non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    return host


def host_reads(waits):
    """Page-locked memory that a copy writes."""
    with device.HostUses():
        pinned = torch.empty(4, pin_memory=True)
        pinned.copy_(torch.ones(4, device='cuda'), non_blocking=True)
        if waits:
            torch.cuda.current_stream().record_event().synchronize()
        return pinned.sum()


def unlocks(waits):
    """Memory of the host that is locked by its address, and that a copy writes."""
    memory, runtime = torch.empty(4), torch.cuda.cudart()
    assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 0
    memory.copy_(torch.ones(4, device='cuda'), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    assert runtime.cudaHostUnregister(memory.data_ptr()) == 0


def frees(tells):
    """Memory that another stream reads, which the allocator is told or not."""
    made, stream = torch.ones(4, device='cuda'), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kept = made * 2
    if tells:
        made.record_stream(stream)
    del made
    again = torch.ones(4, device='cuda')
    return kept, again


def weight_gradient(defined):
    """W adds to `main_grad`; the hook of a node that a side stream has made reduces that."""
    weight = torch.nn.Parameter(torch.ones(4, 4, device='cuda'))
    main_grad, x = torch.zeros(4, 4, device='cuda'), torch.ones(4, 4, device='cuda')
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    torch.cuda.current_stream().wait_stream(stream)

    def reduce(*_):
        weight.grad = None
        device.launch('reduce', [], [main_grad])

    def compute():
        main_grad.addmm_(x, x)
        return [torch.empty(4, 4, device='cuda') if defined else None]

    node.register_hook(reduce)
    store = WeightGradStore()
    store.open((0, 0))
    with store.scope((0, 0)):
        store.defer([weight], compute)
    with device.within('0W0'):
        store.run((0, 0))


# what is broken: (what runs, what is said)
SEEDED = {
    'a wait is removed': (reads_on_another, 'does not wait for aten::fill_.Scalar on stream 0'),
    'a copy is moved': (copies_out, 'copy to the host on stream'),
    'the host reads early': (
        host_reads,
        'aten.sum.default on the host in no pass does not wait for copy to the host on stream 0',
    ),
    'memory is unlocked early': (unlocks, 'memory is free for unlock on the host'),
    'memory is freed early': (frees, 'memory is free for aten::fill_.Scalar on stream 0'),
    'autograd is given None': (
        weight_gradient,
        'does not wait for aten::addmm_ on stream 0 in 0W0',
    ),
}


@pytest.mark.parametrize('broken', SEEDED)
def test_a_seeded_race_is_found(broken):
    """And nothing is said of the same with what is missing there."""
    work, said = SEEDED[broken]
    (race,), _ = seen(work, False)
    assert said in race
    assert seen(work, True)[0] == []


@pytest.mark.parametrize('how', ['an event', 'the host'])
def test_other_ways_to_wait(how):
    assert seen(reads_on_another, how)[0] == []


# by what is asked of numbers on the device, page-locked memory, and a stream
WAITING = {
    'item': lambda x, *_: x.sum().item(),
    'bool': lambda x, *_: bool(x.sum() > 0),
    'tolist': lambda x, *_: x.tolist(),
    'nonzero': lambda x, *_: torch.nonzero(x),
    'equal': lambda x, *_: torch.equal(x, x),
    'mask': lambda x, *_: x[x > 0],
    'values by mask': lambda x, *_: x.__setitem__(x > 0, torch.ones(4, device='cuda')),
    'pageable': lambda x, *_: x.to('cpu'),
    'a copy to plain memory': lambda x, *_: torch.ones(4).copy_(x, non_blocking=True),
    'a copy from plain memory': lambda x, *_: x.copy_(torch.ones(4), non_blocking=True),
    'pinned, blocking': lambda x, pinned, _: pinned.copy_(x),
    'to the device, blocking': lambda x, pinned, _: x.copy_(pinned),
    'event': lambda x, pinned, stream: stream.record_event().synchronize(),
    'stream': lambda x, pinned, stream: stream.synchronize(),
    'device': lambda *_: torch.cuda.synchronize(),
    'cache': lambda *_: torch.cuda.empty_cache(),
    'in a backward': lambda x, *_: backward(x, looks),
}
RUNNING_ON = {
    'a value by mask': lambda x, *_: x.__setitem__(x > 0, 0.0),
    'where': lambda x, *_: torch.where(x > 0, x, 0.0),
    'indices': lambda x, *_: x[torch.zeros(2, dtype=torch.int64, device='cuda')],
    'arithmetic': lambda x, *_: (x @ x).add_(1).softmax(0),
    'types': lambda x, *_: x.to(torch.bfloat16).float(),
    'the host alone': lambda *_: torch.ones(3).sum().item(),
    'pinned': lambda x, pinned, _: pinned.copy_(x, non_blocking=True),
    'to pinned memory': lambda x, *_: x.to('cpu', non_blocking=True),
    'to the device': lambda x, pinned, _: x.copy_(pinned, non_blocking=True),
    'a query': lambda x, pinned, stream: [stream.record_event().query() for _ in range(9)],
    'backward': lambda x, *_: backward(x, lambda gradient: 2 * gradient),
}


def ask(what):
    x, pinned = torch.ones(4, device='cuda'), torch.zeros(4).pin_memory()
    return (WAITING | RUNNING_ON)[what](x, pinned, torch.cuda.current_stream())


def looks(gradient):
    return 2 * gradient if gradient.sum() > 0 else gradient


def backward(made, hook):
    """The backward of a product, with a hook on what it gets."""
    made.requires_grad_()
    doubled = 2 * made
    doubled.register_hook(hook)
    doubled.sum().backward()


@pytest.mark.parametrize('what', WAITING | RUNNING_ON)
def test_what_makes_the_host_wait(what):
    races, found = seen(ask, what)
    assert len(found) == (what in WAITING)
    assert what in WAITING or races == []


def test_events():
    """When an event has happened: not at once, and once the host has waited for a later one."""

    def marked():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    first, second, third = marked(), marked(), marked()
    assert not first.query() and not second.query()
    with pytest.raises(RuntimeError, match='Both events must be completed'):
        first.elapsed_time(third)
    second.synchronize()
    assert first.query() and second.query() and not third.query()
    assert first.elapsed_time(second) >= 0


def test_errors():
    """CUDA tells the error of a refusal to who starts a kernel next."""
    memory, runtime = torch.empty(4), torch.cuda.cudart()
    with device.refusing(2):
        assert runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) == 2
    with pytest.raises(RuntimeError, match='CUDA error 2, of an earlier call'):
        torch.ones(4, device='cuda')
    made = torch.ones(4, device='cuda')
    assert not memory.is_pinned()
    assert runtime.cudaHostUnregister(memory.data_ptr()) != 0, 'it is not locked'
    with pytest.raises(RuntimeError, match='of tensors on the device and on the host'):
        made + torch.ones(4)


@pytest.mark.parametrize('looks', [False, True])
def test_recorded_memory_comes_back_when_the_host_knows(looks):
    with device.recording() as order:
        big, stream = torch.empty(1000, dtype=torch.uint8, device='cuda'), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            big.zero_()
        big.record_stream(stream)
        del big
        if looks:
            stream.synchronize()
        torch.empty(1000, dtype=torch.uint8, device='cuda')
    assert not order.races and order.planned == 1000
    assert order.held == (1000 if looks else 2000)


def test_places():
    """Of tensors made of one on the device, and of others; memory that nobody wrote is NaN."""
    x = torch.ones(2, 2, device='cuda')
    assert x.is_cuda and not x.is_cpu and x.device == torch.device('cuda', 0)
    assert all(t.is_cuda for t in (x + 1, x[0], x.t(), torch.zeros_like(x), x.new_empty(3)))
    assert torch.nn.Parameter(x).is_cuda
    assert not any(t.is_cuda for t in (torch.ones(1), x.to('cpu'), x.new_empty(3, device='cpu')))
    assert torch.empty(1, pin_memory=True).is_pinned() and not torch.empty(1).is_pinned()
    with pytest.raises(RuntimeError, match='captures no CUDA graphs'):
        torch.cuda.CUDAGraph()
    assert torch.empty(3, device='cuda').isnan().all()
    assert str(torch.empty(2, device='cuda').type()) == 'torch.cuda.FloatTensor'
