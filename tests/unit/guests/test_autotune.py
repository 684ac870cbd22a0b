"""What auto makes of what ranks measured."""

import re
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_zbpp import Costs, Placement, Schedule, build, simulate
from megatron_zbpp.analysis.fit_costs import fit, measured_costs
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.guests import auto_plan, background_search
from megatron_zbpp.guests.auto_plan import AutoPlan
from megatron_zbpp.guests.background_search import BackgroundSearch, schedule_text
from megatron_zbpp.guests.measurements import Measured, merge_measurements
from megatron_zbpp.ir import BW, B, F, W
from megatron_zbpp.mcore.programs import start_family
from megatron_zbpp.runtime.executor import Record
from megatron_zbpp.runtime.measure import Iteration

PLACEMENT = Placement.v(2)
SCHEDULE = build('zb-v', 2, 4)
COSTS = Costs.uniform(PLACEMENT)
MIB = 2**20


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    monkeypatch.setattr(auto_plan.dist, 'get_rank', lambda *_: 0)


class CountingClock:
    """Marks are the bytes."""

    def allocated(self, mark):
        return mark


def iteration(kinds, schedule=SCHEDULE):
    """One of rank 0, where each pass of a stage changes what is allocated by so much."""
    record, now = Record(), 1000
    for p in schedule.passes[0]:
        after = now + kinds[p.stage][p.kind]
        record.passes.append(p)
        record.marks.append((now, after))
        now = after
    return Iteration(schedule, None, record, CountingClock())


def test_bytes_by_stage():
    found = iteration({0: {F: 30, B: -10, W: -20, BW: -30}, 3: {F: 8, B: -8, W: 0, BW: -8}}).held()
    assert found == {0: (30, 20), 3: (8, 0)}
    schedule = build('seq-zb-v', 2, 2, num_slices=3)
    kinds = {0: {F: 30, B: -10, W: -20}, 3: {F: 8, B: -8, W: 0}}
    assert iteration(kinds, schedule).held() == {0: (90, 60), 3: (24, 0)}
    # as with tensor parallelism, where inputs are gathered for W: nothing is clipped
    found = iteration({0: {F: 30, B: 20, W: -50, BW: -30}, 3: {F: 8, B: 0, W: -8, BW: -8}}).held()
    assert found == {0: (30, 50), 3: (8, 8)}


def measured(rank, held, spare):
    return Measured(
        COSTS, 1.0, {stage: held[stage] for stage in PLACEMENT.stages(rank)}, spare, rank
    )


def test_activations_as_measured():
    """The fullest rank, here the one with both inner stages, counts as full."""
    held = [(10 * MIB, 5 * MIB), (30 * MIB, 30 * MIB), (10 * MIB, 0), (20 * MIB, 20 * MIB)]
    found = [measured(rank, held, 400 * MIB) for rank in (0, 1)] * 3
    costs, limit, full = merge_measurements(found, SCHEDULE, 4.0)
    assert full == 40 * MIB and limit == 4
    assert costs.amounts['activation'] == pytest.approx((0.25, 0.75, 0.25, 0.5))
    assert costs.amounts['retained'] == pytest.approx((0.125, 0.75, 0, 0.5))
    assert all(costs.times[kind] == COSTS.times[kind] for kind in 'FBW')


@pytest.mark.parametrize(
    ('waits', 'spares', 'limit', 'fits'),
    [
        (10, (100, 10), 4.0, 2 + 0.9 * 10 / 20),  # no more than on the rank with the least room
        # on top of what the measured schedule held in bytes, not in microbatches
        *((waits, (10, 10), 40.0, 0.9 * 10 / 20) for waits in (2, 10, 30)),
        (10, (900, 900), None, 2),  # what runs may run on, though more waits for W than 1F1B holds
        (30, (900, 900), None, 0),
    ],
)
def test_what_fits(waits, spares, limit, fits):
    stages = [(10 * MIB, waits * MIB)] * 4
    found = [measured(rank, stages, spare * MIB) for rank, spare in enumerate(spares)]
    costs, most, _ = merge_measurements(found, SCHEDULE, limit)
    assert costs.amounts['retained'] == pytest.approx((waits / 20,) * 4)
    held = (min if limit else max)(peak(SCHEDULE, costs))
    assert most == pytest.approx(fits if fits >= 2 else held + fits)
    assert limit or waits < 30 or most > 3


@pytest.mark.parametrize('held', [{}, {0: (1.0, 1.0), 3: (1.0, 1.0)}])
def test_where_nobody_counts(held):
    costs, limit, full = merge_measurements([Measured(COSTS, 1.0, held, None, 0)], SCHEDULE, 3.0)
    assert (limit, full) == (3, None)
    assert max(peak(SCHEDULE, costs)) == max(peak(SCHEDULE, COSTS))


@pytest.mark.parametrize(('share', 'cells'), [(0.7, True), (1.1, False)])
def test_cells_are_planned_by_what_they_take(share, cells):
    """What auto measures of the schedule that it begins with, as the planner's process reads it."""
    schedule = build(start_family(None, together=True), 2, 8, together=True)
    assert schedule.placement == PLACEMENT, 'what it begins with otherwise'
    timeline = simulate(schedule, replace(COSTS, together=share))
    costs, limit, _ = merge_measurements(
        [Measured(fit(timeline), 1.0, {}, None, 0)] * 2, schedule, None
    )
    text = schedule_text(schedule, costs, limit, 0.2, 'makespan')
    found = Schedule.from_json(text)
    assert bool(found.together) == cells
    assert simulate(found, costs).makespan <= timeline.makespan


def planned(monkeypatch, schedule, costs):
    """What `auto` says of an iteration of four ranks, what it asks for, and its costs."""
    told, asked = [], []
    monkeypatch.setattr(auto_plan.dist, 'get_rank', lambda: 0)
    monkeypatch.setattr(BackgroundSearch, 'start', lambda _, search, *rest: asked.append(search))
    found = Measured(costs, 1.0, {}, None, 0, (0, 1, 2, 3))
    auto = AutoPlan(say=told.append, _spans=[9.0], _found=[found] * 3)
    auto._start(schedule)
    return told[0], asked[0].args, auto.costs


@pytest.mark.parametrize('mirrored', [False, True])
def test_plans_know_the_latency_of_each_pair_of_ranks(monkeypatch, mirrored):
    """Also where Megatron has the ranks of a V in reverse."""
    schedule = build('zb-v', 4, 8)
    schedule = schedule.reversed() if mirrored else schedule
    edges = tuple((*pair, 0.7e-3) for pair in ((0, 1), (1, 0)))
    costs = replace(Costs.uniform(schedule.placement, 2e-3, 2e-3, 2e-3, comm=0.1e-3), edges=edges)
    measured = measured_costs(simulate(schedule, costs))
    told, (start, given, *_), costs = planned(monkeypatch, schedule, measured)
    assert start.placement.only_route[0] == 0
    assert given.edge(*((2, 3) if mirrored else (0, 1))) == pytest.approx(0.7e-3)
    assert simulate(start, given).makespan == pytest.approx(simulate(schedule, costs).makespan)
    assert 'messages 0.1 to 0.7 ms' in told


def test_what_is_measured_of_messages_counts_hops(monkeypatch):
    """Edges of unlike bytes between the same two ranks, here from stage 6 to 7 and back."""
    schedule = build('zb-v', 4, 8)
    costs = Costs.uniform(schedule.placement, 2e-3, 2e-3, 2e-3, comm=0.1e-3)
    costs = replace(costs, hops=((0.0, 0.0),) * 6 + ((0.3e-3, 0.4e-3),))
    assert 'messages 0.1 to 0.5 ms' in planned(monkeypatch, schedule, costs)[0]


@pytest.mark.parametrize('settled', [False, True])
def test_each_batch_size_is_planned_for_by_itself(monkeypatch, settled):
    """A planner for one goes on while calls of another are measured, and what it knows stays."""
    auto = AutoPlan()
    assert auto.after(SimpleNamespace(schedule=build('zb-v', 2, 4)), None) is None
    monkeypatch.setattr(
        background_search, 'COMMAND', (sys.executable, '-c', 'import time; time.sleep(60)')
    )
    auto._planner = planner = BackgroundSearch('', partial(str), 60, print)
    auto.planned, auto._settled = build('zb-v', 2, 4), settled
    assert not auto.counting
    assert auto.after(SimpleNamespace(schedule=build('zb-v', 2, 6)), None) is None
    assert not planner.ended() and auto.counting and auto.planned is None and auto._seen == 1
    auto._search = partial(str)
    auto._launch()
    assert auto._planner is None, 'one planner at a time'
    planner.end()
    auto._launch()
    assert auto._planner is not None and auto._search is None
    auto._planner.end()
    auto._begin(4)
    assert auto._planner is planner and auto.planned is not None and auto._settled is settled
    auto._begin(6)
    assert auto._seen == 1 and auto.planned is None


def test_a_slow_replica_is_named(monkeypatch):
    """Of three, by the rank of the job; the costs to plan for are the usual ones."""
    monkeypatch.setattr(BackgroundSearch, 'start', lambda *_: None)
    slow = COSTS.with_times(F=(0.5, 0.8, 0.8, 0.5), W=(0.5, 0.8, 0.8, 0.5))
    found = [
        Measured(slow if ranks == (1, 4) else COSTS, 1.0, {}, None, rank, ranks)
        for ranks in ((0, 3), (1, 4), (2, 5))
        for rank in (0, 1)
    ]
    said = []
    auto = AutoPlan(say=said.append, _spans=[9.0], _found=found)
    auto._start(SCHEDULE)
    assert 'rank 4 takes 1.4 times as long as other replicas usually do' in said[1]
    assert auto.costs.times['F'] == COSTS.times['F']
    two = AutoPlan(say=said.append, _spans=[9.0], _found=found[:4])
    two._start(SCHEDULE)
    assert len(said) == 3, 'of two, neither is the usual one'
    counted = [replace(each, spare=(3 + each.rank) * 2**30) for each in found[:2]]
    AutoPlan(say=said.append, _spans=[9.0], _found=counted)._start(SCHEDULE)
    assert said[-1].endswith('; 3 GiB or more never needed'), 'which side tasks may have'


def asked(monkeypatch, tmp_path, program, seconds=30.0):
    """What `auto` says, and what it answers, where the planner is this program."""
    file = tmp_path / 'planner.py'
    file.write_text(program)
    monkeypatch.setattr(background_search, 'COMMAND', (sys.executable, str(file)))
    said = []
    found = [Measured(COSTS, 9.0, {}, None, 0)]
    auto = AutoPlan(seconds=seconds, say=said.append, _spans=[9.0], _found=found)
    auto._start(SCHEDULE)
    answer = auto._poll(SCHEDULE)
    while answer == '':
        time.sleep(0.01)
        answer = auto._poll(SCHEDULE)
    return said[1:], answer


BETTER = build('zb-v', 2, 4).to_json()
NOISY = f"""
import sys
sys.stdin.read()
print('a line of somebody')
open(sys.argv[1], 'w').write({BETTER!r})
"""


def test_a_planner_that_prints(monkeypatch, tmp_path):
    """What stands in its file counts, not what somebody prints."""
    said, answer = asked(monkeypatch, tmp_path, NOISY)
    assert answer == 'keep' and said[0].startswith('auto: nothing better found (simulated: ')
    assert re.search(r'ms with zb-v, .* ms planned, \d+\.\d ms with 1f1b\); zb-v stays', said[0])


@pytest.mark.parametrize(
    ('program', 'seconds', 'words'),
    [
        ('import sys; sys.exit(3)', 30, 'auto: planning failed, see above; zb-v stays'),
        ('import os; os.abort()', 30, 'auto: planning failed, see above; zb-v stays'),
        ('import time; time.sleep(60)', 0.05, 'auto: the planner did not answer within 0 s'),
        ('', 30, 'auto: planning failed, its answer is no schedule: it is empty'),
        (NOISY.replace('0F0', '0F9'), 30, 'auto: planning failed, its answer is no schedule: '),
    ],
    ids=['fails', 'dies', 'hangs', 'says nothing', 'lies'],
)
def test_a_planner_that_fails(monkeypatch, tmp_path, program, seconds, words):
    """The schedule that runs stays, and training goes on."""
    said, answer = asked(monkeypatch, tmp_path, program, seconds)
    assert answer == 'keep' and said[0].startswith(words) and 'zb-v stays' in said[-1]


def test_a_planner_that_cannot_be_started(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'nothing'))
    said, answer = asked(monkeypatch, tmp_path, '')
    assert answer == 'keep' and said[0].startswith('auto: the planner cannot be started (')


@pytest.mark.parametrize(
    ('before', 'now', 'back'),
    [([5, 6, 7], [8, 9, 9], True), ([5, 6, 9], [8, 9, 9], False), ([5, 6, 7], [4, 4, 4], False)],
)
def test_back_where_it_was_better(monkeypatch, before, now, back):
    """Only beyond noise: each iteration now took longer than any before."""
    said = []
    auto = AutoPlan(say=said.append, _spans=now, _measured_before=before, _original=SCHEDULE)
    assert auto._compare(SCHEDULE) is (SCHEDULE if back else None)
    assert ('goes back to zb-v' in said[0]) == back
    assert ('slower' in said[0]) == (now[1] > before[1])
