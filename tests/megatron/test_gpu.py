"""What only a GPU can show. Ranks share one, over NCCL."""

import contextlib
import importlib.util
import time

import pytest
import torch
import torch.distributed as dist
from example import run
from gpu import marks, needs_te
from models import Job, check
from nvidia import require_same

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build

NO_CLIPPING = 1e9
pytestmark = marks


@pytest.fixture
def device():
    return torch.device('cuda', torch.cuda.current_device())


def execute(name, m, backend):
    """The executor with plain torch stages on CUDA, beside all stages on this process."""
    schedule = build(name, 2, m)
    own, rank = torch.device('cuda', torch.cuda.current_device()), dist.get_rank()
    group = dist.new_group(backend=backend)
    store, count = WeightGradStore(), schedule.num_stages
    stages = {s: Stage(store, s, count).to(own) for s in schedule.placement.stages(rank)}
    message = Message((64, 64), torch.float32, own)
    pairs = {(0, 1), (1, 0)}
    executor = Executor(
        lower(schedule)[rank], stages, Channels(group, pairs, own), message, store, clock_for(own)
    )
    host = time.perf_counter()
    record = executor.run()
    torch.cuda.synchronize()
    host = time.perf_counter() - host
    times = [(executor.clock.seconds(a), executor.clock.seconds(b)) for a, b in record.marks]
    single = [Stage(None, s, count).to(own) for s in range(count)]
    for microbatch in range(m):
        value = None
        for index, stage in enumerate(single):
            value = stage.forward(Pass(F, index, microbatch), value)
        value.backward()
    same = [torch.equal(stages[s].weight.grad, single[s].weight.grad) for s in stages]
    dist.destroy_process_group(group)
    return same, times, host


class Stage(torch.nn.Module):
    """tanh(x w), whose weight gradient waits if the store defers; the last one returns a loss."""

    def __init__(self, store, stage, count):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.nn.Parameter(torch.randn(64, 64, generator=generator) / 8)
        self.store, self.first, self.last = store, stage == 0, stage == count - 1

    def forward(self, p, received):
        from stages import DeferredLinear

        weight = self.weight
        if self.first:
            received = torch.full_like(weight, 0.1 * (p.microbatch + 1)).detach().requires_grad_()
        if self.store is not None and self.store.deferring:
            y = DeferredLinear.apply(self.store, weight, received, weight.detach())
        else:
            y = received @ weight
        return y.square().sum() if self.last else torch.tanh(y)

    def backward(self, p, received, output, gradient):
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    def release(self, output):
        pass

    def grad_sync(self, last):
        return contextlib.nullcontext()


def check_execution(results):
    for same, times, host in results:
        assert same and all(same)
        assert all(start <= end for start, end in times)
        flat = [t for span in times for t in span]
        assert flat == pytest.approx(sorted(flat), abs=1e-6), 'passes follow each other'
        assert 0 < flat[-1] - flat[0] < host


@pytest.mark.parametrize('backend', ['gloo', 'nccl'])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_executor(ranks, name, backend):
    """Over gloo messages go by way of the host."""
    check_execution(ranks(2).run(execute, name, 6, backend))


def test_clock(device):
    """Marks are in the order of the device's work, and tell its time, not the host's."""
    clock = clock_for(device)
    x = torch.randn(4096, 4096, device=device)
    x @ x  # cuBLAS is ready
    torch.cuda.synchronize()
    start = time.perf_counter()
    marks = [clock.mark()]
    for _ in range(3):
        for _ in range(10):
            x @ x
        marks.append(clock.mark())
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    assert all(map(clock.reached, marks))
    seconds = [clock.seconds(mark) for mark in marks]
    assert seconds == sorted(seconds)
    measured = seconds[-1] - seconds[0]
    assert 0.3 * whole < measured < 1.05 * whole
    assert issued < whole
    assert start - 0.05 < seconds[0] < start + whole, "on the host's clock"


@pytest.mark.parametrize('flags', [(), ('--bf16',)], ids=['fp32', 'bf16'])
def test_identical_to_megatron(ranks, data, tmp_path, flags):
    common = ['--pipeline-model-parallel-size', 2, '--num-layers', 4, '--data-path', data, *flags]
    common += ['--global-batch-size', 6, '--train-iters', 10, '--clip-grad', NO_CLIPPING]
    reference = run(ranks(2), *common, '--pipeline-schedule', 'megatron')
    assert len(set(reference.losses)) == 10
    for schedule in ('1f1b', 'zb-h1', 'zb-v'):
        trained = run(ranks(2), *common, '--pipeline-schedule', schedule)
        require_same(trained, reference)


@pytest.mark.skipif(
    importlib.util.find_spec('grouped_gemm') is None, reason='needs grouped_gemm: pip install it'
)
def test_grouped_gemm_of_experts(ranks, data):
    check(ranks, data, 'zb-h1', Job('grouped experts', te=False, bf16=True))


def test_experts_one_by_one(ranks, data):
    check(ranks, data, 'zb-h1', Job('experts', te=False, bf16=True))


@needs_te
def test_te_context_parallelism(ranks, data):
    check(ranks, data, 'zb-h1', Job(bf16=True, cp=2))
