"""torch's own autograd engine on the recorded device: streams are ordered, and seeded races found.

In a process of its own: who has the device keeps it.
"""

from __future__ import annotations

import pytest
from ranks import Pool, Ranks
from recorded import build, device


@pytest.fixture(scope='module')
def process():
    pool = Pool(device.join, build.build(), emulated=False)
    yield Ranks(1, pool)
    pool.stop()


def recorded(work, *args):
    """In the process: what `work` leaves in the log."""
    with device.recording() as order:
        work(*args)
    return [str(race) for race in order.races], [wait.what for wait in order.waits], order


def seen(work, *args):
    """As `recorded`, of what can be sent."""
    races, waits, order = recorded(work, *args)
    return races, waits, order.planned, order.held


def other_stream():
    import torch

    return torch.cuda.Stream()


def reads_on_another(waits):
    import torch

    made = torch.ones(4, device='cuda')
    stream = other_stream()
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        read = made * 2
    torch.cuda.current_stream().wait_stream(stream)
    return read + made


def copies_out(late):
    """To page-locked memory, behind what computes it, or moved before."""
    import torch

    made, host = torch.zeros(4, device='cuda'), torch.zeros(4).pin_memory()
    stream, computed = other_stream(), torch.cuda.Event()
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


def frees(tells):
    """Memory that another stream reads, which the allocator is told or not."""
    import torch

    made, stream = torch.ones(4, device='cuda'), other_stream()
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
    import torch

    from megatron_zbpp.runtime.weight_grads import WeightGradStore

    weight = torch.nn.Parameter(torch.ones(4, 4, device='cuda'))
    main_grad, x = torch.zeros(4, 4, device='cuda'), torch.ones(4, 4, device='cuda')
    stream = other_stream()
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
    'memory is freed early': (frees, 'memory is free for aten::fill_.Scalar on stream 0'),
    'autograd is given None': (
        weight_gradient,
        'does not wait for aten::addmm_ on stream 0 in 0W0',
    ),
}


@pytest.mark.parametrize('broken', SEEDED)
def test_a_seeded_race_is_found(process, broken):
    """And nothing is said of the same with what is missing there."""
    work, said = SEEDED[broken]
    ((races, *_),) = process.run(seen, work, False)
    assert len(races) == 1 and said in races[0], races
    ((races, *_),) = process.run(seen, work, True)
    assert races == []


def waits(what):
    import torch

    made = torch.ones(4, device='cuda')
    pinned = torch.zeros(4).pin_memory()
    {
        'item': lambda: made.sum().item(),
        'bool': lambda: bool(made.sum() > 0),
        'tolist': lambda: made.tolist(),
        'nonzero': lambda: torch.nonzero(made),
        'mask': lambda: made[made > 0],
        'masked fill': lambda: made.__setitem__(made > 0, 0.0),
        'pageable': lambda: made.to('cpu'),
        'pinned': lambda: pinned.copy_(made, non_blocking=True),
        'pinned, blocking': lambda: pinned.copy_(made),
        'to the device': lambda: made.copy_(pinned, non_blocking=True),
        'where': lambda: torch.where(made > 0, made, 0.0),
        'event': lambda: torch.cuda.current_stream().record_event().synchronize(),
        'stream': lambda: torch.cuda.current_stream().synchronize(),
        'device': lambda: torch.cuda.synchronize(),
    }[what]()


@pytest.mark.parametrize(
    'what',
    ['item', 'bool', 'tolist', 'nonzero', 'mask', 'pageable', 'pinned, blocking', 'event', 'stream',
     'device'],
)  # fmt: skip
def test_what_makes_the_host_wait(process, what):
    ((_, found, *_),) = process.run(seen, waits, what)
    assert len(found) == 1


@pytest.mark.parametrize('what', ['masked fill', 'pinned', 'to the device', 'where'])
def test_what_does_not(process, what):
    ((_, found, *_),) = process.run(seen, waits, what)
    assert found == []


def allocates_anew(looks):
    import torch

    big, stream = torch.empty(1000, dtype=torch.uint8, device='cuda'), other_stream()
    with torch.cuda.stream(stream):
        big.zero_()
    big.record_stream(stream)
    del big
    if looks:
        stream.synchronize()
    torch.empty(1000, dtype=torch.uint8, device='cuda')


@pytest.mark.parametrize('looks', [False, True])
def test_recorded_memory_comes_back_when_the_host_knows(process, looks):
    ((races, _, planned, held),) = process.run(seen, allocates_anew, looks)
    assert races == [] and planned == 1000
    assert held == (1000 if looks else 2000)


def computes():
    """What the device computes, and what the CPU does."""
    import torch

    found = []
    for on in ('cuda', 'cpu'):
        torch.manual_seed(1)
        x = torch.randn(8, 6).to(on).requires_grad_()
        y = torch.nn.functional.layer_norm(x, (6,)).t() @ x.softmax(-1)[:, :4]
        index = torch.tensor([2, 0], device=on)
        z = torch.cat([y[index], y.index_select(0, index)]).to(torch.bfloat16).float()
        z.sort().values.square().sum().backward()
        with torch.no_grad():
            torch._foreach_add_([x], [x.grad])
            x.clamp_(min=0).masked_fill_(x > 1, -1.0)
        found.append([t.detach().cpu() for t in (x, x.grad, z, *torch.topk(x, 2))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(RuntimeError, match='captures no CUDA graphs'):
        torch.cuda.CUDAGraph()
    fresh = torch.empty(3, device='cuda')
    assert fresh.is_cuda and fresh.device.type == 'cuda' and fresh.isnan().all()
    return str(torch.empty(2, device='cuda').type())


def test_bits_are_the_cpus(process):
    """And memory that nobody wrote is NaN."""
    assert process.run(computes) == ['torch.cuda.FloatTensor']
