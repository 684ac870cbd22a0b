"""What a run that freezes says, and when."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_zbpp.guests.freeze_run import FreezeRun
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.schedules import build

SCHEDULE = build('zb-h1', 2, 2)
PLAN = FreezePlan(
    SCHEDULE,
    tuple((p, 0.5) for order in SCHEDULE.passes for p in order if p.kind == 'W'),
    8.0,
    10.0,
    warm_up=3,
    unit=30,
)


def ran(steps, first=0):
    """What is said, with what step, and what was left out of four weight gradients in each."""
    said, out = [], []
    run = FreezeRun(PLAN, lambda message: said.append((run.step, message)))
    for at in range(first, first + steps):
        run.before(at if first else None)
        out.append(len(run((1, 0, 0), 4)))
        window = 0.08 if run.left_out else 0.1
        run.after(
            SimpleNamespace(extent=lambda window=window: SimpleNamespace(window=window)), None
        )
    return said, out, run


def test_phases():
    """Loud before the first gradient is left out, and when all planned ones are."""
    said, out, run = ran(130)
    steps, words = zip(*said, strict=True)
    assert steps[:4] == (0, 3, 33, 93)
    assert words[0].startswith('FREEZING IS ON') and 'will not be those' in words[0]
    assert 'nothing is frozen while times are' in words[1]
    assert 'another one from here on' in words[2]
    assert words[3].startswith('FREEZING: from step 93')
    assert out[:34] == [0] * 34 and out[63] == 1 and set(out[93:]) == {2}
    assert run.seen == 4 * 130 and run.left_out == sum(out)
    assert len(said) == 5
    assert 'freezing: 100.0 ms before, 80.0 ms with it on this rank (20.0% less; 20.0%' in words[4]


def test_a_loop_says_where_it_resumes():
    """Then steps count on from there, in the phase and with the draws of an unbroken run."""
    run = FreezeRun(PLAN, lambda message: None)
    run.resume(130)
    iteration = SimpleNamespace(extent=lambda: SimpleNamespace(window=0.1))
    for step in (130, 131):
        run.before(None)
        assert run.step == step and run((1, 0, 0), 4) == PLAN.left_out(step, 1, 0, 4) != frozenset()
        run.after(iteration, None)
    assert run.first == 130


def test_a_run_that_goes_on():
    """From a checkpoint: in the phase of its step, with nothing to compare with."""
    said, out, _ = ran(40, first=200)
    assert [step for step, _ in said] == [200]
    assert set(out) == {2}
