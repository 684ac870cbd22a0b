"""TimelyFreeze in a training: nothing changes before it begins, then only what it says."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from defined import require_defined, watched
from nvidia import needs_training, run

from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.schedules import build

FLAGS = ['--pipeline-model-parallel-size', 2, '--clip-grad', 1e9, '--train-iters', 40]
BEGINS = 31  # the step, from 0: one of warm-up, thirty of monitoring


def plan(folder, ratio, name='zb-h1', m=4):
    schedule = build(name, 2, m)
    ratios = [(p, ratio) for order in schedule.passes for p in order if p.kind in ('W', 'BW')]
    file = folder / f'{ratio}.json'
    made = FreezePlan(schedule, tuple(ratios), 8.0, 9.0, warm_up=1, unit=1)
    file.write_text(made.to_json())
    return ['--pipeline-schedule', name, '--pipeline-freeze', file]


@contextmanager
def counted(training):
    """How many weight gradients this rank left out, of how many."""
    from megatron_zbpp.mcore import enabled

    found = []
    yield found
    (freezing,) = enabled.plugin.session.guests
    found += [freezing.left_out, freezing.seen, freezing.step]


@contextmanager
def both(training):
    """What `counted` finds, and what hooks of parameters were called with."""
    with counted(training) as found, watched(training) as seen:
        yield found, seen


@needs_training
@pytest.mark.parametrize('name', ['zb-h1', pytest.param('zb-v', marks=pytest.mark.full)])
def test_freezing(ranks, tmp_path, name):
    """To the bit of the same without it until it begins; and then what was planned."""
    flags = [*FLAGS, '--global-batch-size', 4]
    stock = run(ranks(2), *flags, '--pipeline-schedule', name)
    nothing = run(ranks(2), *flags, *plan(tmp_path, 0.0, name), event=counted)
    assert nothing.losses == stock.losses and nothing.parameters == stock.parameters
    half = run(ranks(2), *flags, *plan(tmp_path, 0.5, name), event=counted)
    # the loss of a step is that of the weights before it
    same = {at: loss for at, loss in stock.losses.items() if at <= BEGINS + 1}
    assert {at: half.losses[at] for at in same} == same
    assert all(half.losses[at] != stock.losses[at] for at in range(BEGINS + 3, 41))
    for out, seen, steps in half.reported:
        assert steps == 40
        assert out / seen == pytest.approx(0.5 * (40 - BEGINS) / 40, rel=0.15)
    assert nothing.reported[0][0] == 0


@needs_training
def test_replicas_and_overlap(ranks, tmp_path):
    """Both replicas leave out the same, whether gradients are reduced amid W or behind it.

    Behind it hooks need no gradient; amid it those that are left out must be defined, too.
    """
    flags = [*FLAGS, '--global-batch-size', 8, *plan(tmp_path, 0.5)]
    plain = run(ranks(4), *flags, event=counted)
    overlapped = run(ranks(4), *flags, '--overlap-grad-reduce', event=both)
    require_defined(tuple(seen for _, seen in overlapped.reported))
    assert plain.losses == overlapped.losses and plain.parameters == overlapped.parameters
    one, same, two, alike = (out for out, _, _ in plain.reported)
    assert (one, two) == (same, alike) and one > 0


@needs_training
def test_a_resumed_run_goes_on_in_its_phase(ranks, tmp_path):
    """From the step of the checkpoint on, not from the first."""
    flags = [*FLAGS, '--global-batch-size', 4, *plan(tmp_path, 0.5)]
    whole = run(ranks(2), *flags, '--save', tmp_path, '--save-interval', 34, event=counted)
    rest = run(ranks(2), *flags, '--load', tmp_path, '--ckpt-step', 34, event=counted)
    assert rest.losses == {at: loss for at, loss in whole.losses.items() if at > 34}
    assert rest.parameters == whole.parameters


def stepped(file, steps, first):
    """The gradients of each step of a loop of one's own, on this rank, as sums in hex."""
    from functools import partial
    from unittest import mock

    from example import forget_groups
    from megatron.core import parallel_state, tensor_parallel

    import megatron_zbpp
    from benchmarks.pipelines.runners import ZbppRunner
    from benchmarks.training.model import Gpt

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    freezing = mock.patch.object(
        megatron_zbpp, 'enable', partial(megatron_zbpp.enable, freeze=file)
    )
    try:
        with freezing:
            gpt = Gpt(4, 32, 16, 8, 64)
            runner = ZbppRunner(build('zb-h1', 2, 4), 'zb-h1', gpt, optimizer=False)
        if first:
            runner.plugin.resume(first)
        found = []
        with runner.ready():
            for _ in range(steps):
                runner.iterate()
                # none where all of a step were left out
                grads = [p.grad for p in runner.parameters if p.grad is not None]
                found.append(sum(grad.abs().sum().item() for grad in grads).hex())
        return found
    finally:
        forget_groups()


def test_a_loop_of_ones_own_resumes_in_its_phase(ranks, tmp_path):
    """It says at which step; weights are the same in all steps here, gradients as drawn."""
    *_, file = plan(tmp_path, 0.5)
    whole = ranks(2).run(stepped, file, BEGINS + 12, 0)
    rest = ranks(2).run(stepped, file, 8, BEGINS + 4)
    for every, later in zip(whole, rest, strict=True):
        assert len({*every[:BEGINS]}) == 1, 'nothing is left out'
        assert later == every[BEGINS + 4 :]
        assert every[0] not in later and len({*later}) > 1, 'drawn anew at a step of ten'
