"""Asynchronous pipelines: delays, copies and periods of the papers; calls, and their steps."""

import re
from dataclasses import replace
from typing import cast

import pytest
import torch
from orders import by_hand
from published import published

from megatron_zbpp import Costs, Pass, Schedule, ScheduleError, build, check, simulate
from megatron_zbpp.analysis.deadlock import DeadlockError
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Send
from megatron_zbpp.ir import chain
from megatron_zbpp.render.scene import bars, colour, legend
from megatron_zbpp.render.svg import svg
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.versions import Corrected, OneStorage
from megatron_zbpp.techniques.updates import calls
from megatron_zbpp.techniques.updates.calls import calls_of
from megatron_zbpp.techniques.updates.orders import without_flush
from megatron_zbpp.techniques.updates.versions import (
    NEWEST,
    STASHED,
    Updates,
    copies,
    delays,
    forward_versions,
    steady_state,
    updating,
    with_weight_copies,
)


def endless(p, m, everywhere=False, old=(), backward=STASHED):
    return without_flush('endless', updating(chain(p), m, everywhere, old, backward), m)


@pytest.mark.parametrize(('p', 'm', 'ages', 'kept'), published(__file__, 'PipeDream'))
def test_delays_and_copies_of_pipedream(p, m, ages, kept):
    schedule = endless(p, m)
    check(schedule)
    found = delays(schedule)
    assert ages is None or [[each.least, each.most] for each in found] == ages
    assert [each.mean for each in found] == pytest.approx([(p - 1 - s) / m for s in range(p)])
    assert [*copies(schedule)] == kept
    assert copies(endless(p, m, backward=NEWEST)) == (1,) * p


def test_versions_of_forwards():
    """Microbatch j of stage s uses version floor((j - (p-1-s)) / m)."""
    for old, p, m in (((), 4, 3), ((), 3, 1), ((1,) * 4, 4, 3)):
        for f, version in forward_versions(endless(p, m, old=old)).items():
            stale = (f.microbatch - (p - 1 - f.stage)) // m
            assert version == max(0, f.microbatch // m - 1 if old else stale), f


@pytest.mark.parametrize('p', [2, 4, 8])
def test_a_delay_of_one_step_needs_as_many_microbatches_as_ranks_behind(p):
    """2BW: m >= p-1 (arXiv 2006.09503 asks for p), and then two copies."""
    for m in (p - 1, p, 2 * p):
        schedule = endless(p, m, old=(1,) * p)
        check(schedule)
        assert Schedule.from_json(schedule.to_json()) == schedule
        assert copies(schedule) == (2,) * p
        assert [*delays(schedule)] == [(1, 1, 1)] * p
    if p == 2:
        with pytest.raises(ScheduleError, match='0F1 on rank 0 comes before 0U0, which it needs'):
            check(endless(2, 1, old=(0, 0)))
        return
    m = p - 2
    first = f'0F{2 * m} on rank 0 comes before 0U{m - 1}, which it needs'
    with pytest.raises(ScheduleError, match=first) as found:
        check(endless(p, m, old=(1,) * p))
    assert f'[0F{2 * m}' in str(found.value)


# p, m: time of a call of F = 1, BW = 2; without a barrier, and with all ranks at each step
PERIODS = {(4, 4): (12, 18), (4, 8): (24, 30), (8, 8): (24, 38), (8, 16): (48, 62)}


@pytest.mark.parametrize(('p', 'm'), PERIODS)
def test_a_barrier_at_each_step_costs_more_than_asynchrony_gains(p, m):
    for everywhere, expected in zip((False, True), PERIODS[p, m], strict=True):
        for old in ((), (1,) * p):
            schedule = endless(p, m, everywhere, old)
            check(schedule)
            found = steady_state(simulate(schedule, Costs.uniform(schedule.placement)))
            assert (found.num_microbatches, found.period) == (m, expected)
            assert found.bubble == pytest.approx(1 - 3 * m / expected)


def test_updates_wait_and_are_waited_for_with_their_whole_group():
    """By hand: F of microbatch 2 waits for the step of microbatches 0 and 1."""
    graph = updating(chain(1), 2, delays=(0,))
    schedule = by_hand(1, 4, '0F0 0BW0 0F1 0BW1 0U1 0F2 0BW2 0F3 0BW3 0U3', graph=graph)
    check(schedule)
    assert Pass('U', 0, 1) in schedule.predecessors(Pass('F', 0, 2))
    assert Pass('U', 0, 1) in schedule.predecessors(Pass('F', 0, 3))
    costs = Costs.uniform(schedule.placement).with_times(U=(5.0,))
    assert simulate(schedule, costs).by_pass[Pass('F', 0, 2)] == (11, 12)


@pytest.mark.parametrize(
    ('p', 'm', 'old'), [(2, 1, ()), (4, 1, ()), (4, 2, ()), (4, 4, ()), (4, 3, (1,) * 4)]
)
def test_calls_repeat(p, m, old):
    """They run each pass once, in order; a rank runs ahead by what it is before the last."""
    schedule = endless(p, m, old=old)
    found = calls_of(schedule)
    for rank, order in enumerate(schedule.passes):
        whole = [found.program(rank, call) for call in range(3)]
        ran = [i for program in whole for i in program if isinstance(i, Pass)]
        assert ran == [p for p in order if p.kind != 'U'][: len(ran)]
        forwards = [sum(isinstance(i, Pass) and i.kind == 'F' for i in own) for own in whole]
        assert forwards == [m + p - 1 - rank, m, m]
    sent = [i for i in found.program(0, 1) if isinstance(i, Send)]
    assert [i.message for i in sent] == ['activation'] * m if p > 1 else []


@pytest.mark.parametrize(('name', 'm'), [('pipedream', 4), ('wpipe-joint', 8)])
def test_messages_are_received_in_the_call_in_which_they_are_sent(monkeypatch, name, m):
    """As they are lowered, some are received behind a step of their receiver: ranks cannot meet."""
    schedule = build(name, 4, m)
    calls_of(schedule)
    monkeypatch.setattr(calls, '_receive_in_call_of_send', lambda parts: None)
    with pytest.raises(ValueError, match='crosses the border of call 0: move the forward of'):
        calls_of(schedule)
    monkeypatch.setattr(calls, '_require_closed', lambda *given: None)
    with pytest.raises(DeadlockError, match='rendezvous'):
        calls_of(schedule)


def state(name, p, m):
    schedule = build(name, p, m)
    check(schedule)
    return steady_state(simulate(schedule))


@pytest.mark.parametrize(('p', 'm'), [(2, 1), (4, 3), (4, 4), (8, 16)])
def test_families(p, m):
    """By name; what they do not need is not counted as a copy."""
    assert state('pipedream-2bw', p, m).weight_copies == (2,) * p
    assert state('paci', p, m).weight_copies == (1,) * p
    assert state('pipemare', p, m).weight_copies == (2,) * (p - 1) + (1,)
    assert [*state('paci', p, m).delays] == [*state('pipedream', p, m).delays]
    assert state('pipedream', p, m).delays[-1] == (0, 0, 0)


# periods by list scheduling, and the most activations for each rank
WPIPES = {
    'wpipe': ({(4, 4): 12.5, (4, 8): 24, (8, 8): 26.5}, 2),
    'wpipe-joint': ({(2, 2): 6.5, (4, 4): 14.5, (4, 8): 24.5, (8, 8): 30.5}, 3.5),
}


@pytest.mark.parametrize('name', WPIPES)
def test_wpipe(name):
    """Twice the delay vector 1, 0, and the same versions with joint steps."""
    periods, most = WPIPES[name]
    for (p, m), period in periods.items():
        found = state(name, p, m)
        assert found.period == period
        assert found.weight_copies == (2,) * p + (1,) * p
        assert [each.mean for each in found.delays] == [1] * p + [0] * p
        versions = [forward_versions(build(each, p, m)) for each in WPIPES]
        shared = versions[0].keys() & versions[1].keys()
        assert len(shared) > 2 * p * m and all(versions[0][f] == versions[1][f] for f in shared)
    for p in (1, 2, 3, 4):
        for m in range(1, 10):
            schedule = build(name, p, m)
            check(schedule)
            assert max(peak(schedule, Costs.uniform(schedule.placement))) <= most * p


@pytest.mark.parametrize('p', [1, 2, 3, 4])
def test_joint_steps_of_wpipe(p):
    """Forwards of the next batch come behind all of their rank's own."""
    for m in range(1, 10):
        found = calls_of(build('wpipe-joint', p, m))
        ahead = m if m <= 4 * p else 2 * p
        for rank in range(p):
            assert found.ahead(rank) == ahead
            ran = [str(i) for i in found.program(rank, 2) if isinstance(i, Pass) and i.kind == 'F']
            own = [ran.index(f'{rank + p}F{j}') for j in range(2 * m, 3 * m)]
            next_batch = [f'{rank}F{j}' for j in range(3 * m, 3 * m + ahead)]
            assert ran[max(own) + 1 :][-len(next_batch) :] == next_batch


def test_weights_of_all_copies_count():
    schedule = build('pipedream', 4, 1)
    plain = Costs.uniform(schedule.placement)
    costs = replace(plain, parameters=(8.0,) * 4, amounts={**plain.amounts, 'weights': (2.0,) * 4})
    counted = with_weight_copies(costs, schedule)
    assert counted.parameters == (14, 12, 10, 8)
    assert with_weight_copies(plain, schedule) == plain
    assert with_weight_copies(costs, build('1f1b', 4, 4)) == costs
    check(schedule, memory_limit=18, costs=counted)
    with pytest.raises(ScheduleError, match='0 holds activations of 4 beside parameters of 14'):
        check(schedule, memory_limit=17.9, costs=counted)


def test_pictures_mark_steps_and_tell_versions():
    schedule = build('pipedream-2bw', 2, 2)
    timeline = simulate(schedule, Costs.uniform(schedule.placement))
    fills = {str(bar.ran): bar.fill for bar in bars(timeline)[0]}
    assert fills['0F0'] == fills['0F3'] == colour('F', 0, 2) != fills['0F4'] == colour('F', 1, 2)
    assert fills['0BW4'] == colour('BW', 1, 2)
    picture = svg({'2bw': timeline})
    steps = [p for _, p in schedule if p.kind == 'U']
    (line,) = re.findall(rf'stroke="{colour("U")}"[^>]* d="([^"]*)"', picture)
    assert line.count('M') == len(steps)
    assert 'asynchronous, a call of 2 microbatches takes 6, bubble 0.0%' in picture
    texts = [text for text, _ in legend([schedule])]
    assert 'F of every other version of the weights' in texts


# ---- Steps of the runtime, without a pipeline: one a call, and those of a training that goes on.


def backward(j):
    return Pass('BW', 0, j)


def test_calls_have_one_step():
    calls = calls_of(without_flush('endless', updating(chain(2), 2), 2))
    training = EndlessTraining()
    assert training.step(lambda: 'no call yet') == 'no call yet'
    training.begin(Updates(2), lambda: OneStorage([torch.zeros(1)]))
    first = training.next_tables(calls, 0)
    with pytest.raises(ValueError, match=r'0 optimizer steps in 1 calls: .* step once after each'):
        training.next_tables(calls, 0)
    assert training.step(lambda: training.step(lambda: 'inner')) == 'inner'
    with pytest.raises(ValueError, match='a second optimizer step behind call 1'):
        training.step(lambda: None)
    training.enter(cast(Executor, object()))
    second = training.next_tables(calls, 0)
    assert [str(p) for p in first.passes] == ['0F0', '0F1', '0BW0', '0F2', '0BW1']
    assert [str(p) for p in second.passes] == ['0F3', '0BW2', '0F4', '0BW3']


@pytest.mark.parametrize('steps', [0, 1, 2])
def test_a_training_that_goes_on_corrects_as_the_one_that_ended(steps):
    """What is kept of it, and the newest weights, are all that there is."""
    by = [2.0, 1.0, -3.0]

    def step(weight, versions, amounts):
        for amount in amounts:
            versions.step(lambda amount=amount: weight.data.add_(amount))

    whole, ended = torch.full((1,), 4.0), torch.full((1,), 4.0)
    versions, other = (Corrected([w], [w], every=2, ahead=4, decay=0.25) for w in (whole, ended))
    step(whole, versions, by)
    step(ended, other, by[:steps])
    resumed = ended.clone()
    loaded = {name: {id(resumed): kept[id(ended)]} for name, kept in other.kept().items()}
    going_on = Corrected([resumed], [resumed], 2, 4, 0.25, loaded)
    step(resumed, going_on, by[steps:])
    for each in (versions, going_on):
        each.before_backward(backward(0))
    assert torch.equal(whole, resumed) and whole.item() != 4.0


def test_steps_of_a_training_that_goes_on():
    """Its warm-up is over where the one that ended had it behind it."""
    training = EndlessTraining(warm_up=2)
    training.resume(5)
    assert not training.warms_up() and training.steps == 5
    training.resume(1)
    assert training.warms_up() and training.steps == 2 and not training.warms_up()
