"""What only a GPU can show. Ranks share one, over NCCL."""

import importlib.util
import time

import pytest
import torch
import torch.distributed as dist
from example import run
from gpu import marks, needs_te
from models import Job, check
from nvidia import require_same
from stages import LinearStage, Pipeline

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime.clock import clock_for
from megatron_zbpp.schedules import build

pytestmark = marks


def execute(name, m, backend):
    """The executor with plain torch stages on CUDA, beside all stages on this process."""
    schedule, own = build(name, 2, m), torch.device('cuda', torch.cuda.current_device())
    group, clock = dist.new_group(backend=backend), clock_for(own)
    pipeline = Pipeline(schedule, group, on=own, clock=clock, kept=False)
    host = time.perf_counter()
    record = pipeline.run()
    torch.cuda.synchronize()
    host = time.perf_counter() - host
    times = [(clock.seconds(a), clock.seconds(b)) for a, b in record.marks]
    count = schedule.num_stages
    single = [LinearStage(None, stage, count).to(own) for stage in range(count)]
    for microbatch in range(m):
        value = None
        for index, stage in enumerate(single):
            value = stage.forward(Pass(F, index, microbatch), value)
        value.backward()
    same = [
        torch.equal(stage.weight.grad, single[number].weight.grad)
        for number, stage in pipeline.stages.items()
    ]
    dist.destroy_process_group(group)
    return same, times, host


@pytest.mark.parametrize('backend', ['gloo', 'nccl'])
@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-v'])
def test_executor(ranks, name, backend):
    """Over gloo messages go by way of the host."""
    for same, times, host in ranks(2).run(execute, name, 6, backend):
        assert same and all(same)
        assert all(start <= end for start, end in times)
        flat = [t for span in times for t in span]
        assert flat == pytest.approx(sorted(flat), abs=1e-6), 'passes follow each other'
        assert 0 < flat[-1] - flat[0] < host


def test_clock():
    """Marks are in the order of the device's work, and tell its time, not the host's."""
    device = torch.device('cuda', torch.cuda.current_device())
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
def test_identical_to_megatron(ranks, data, flags):
    common = ['--pipeline-model-parallel-size', 2, '--num-layers', 4, '--data-path', data, *flags]
    common += ['--global-batch-size', 6, '--train-iters', 10, '--clip-grad', 1e9]
    reference = run(ranks(2), *common, '--pipeline-schedule', 'megatron')
    assert len(set(reference.losses)) == 10
    for schedule in ('1f1b', 'zb-h1', 'zb-v'):
        require_same(run(ranks(2), *common, '--pipeline-schedule', schedule), reference)


needs_grouped_gemm = pytest.mark.skipif(
    importlib.util.find_spec('grouped_gemm') is None, reason='needs grouped_gemm: pip install it'
)
MODELS = {
    'grouped experts': pytest.param(
        Job('grouped experts', te=False, bf16=True), marks=needs_grouped_gemm
    ),
    'experts one by one': Job('experts', te=False, bf16=True),
    'context parallelism': pytest.param(Job(bf16=True, cp=2), marks=needs_te),
}


@pytest.mark.parametrize('job', MODELS.values(), ids=MODELS)
def test_models(ranks, data, job):
    check(ranks, data, 'zb-h1', job)
