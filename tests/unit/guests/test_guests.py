"""How a run treats its guests: whom it invites, what it asks them, and what they may change."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_zbpp import Costs, Devices, Layer, Layers, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.guests.background_search import BackgroundSearch, partition_text, schedule_text
from megatron_zbpp.guests.base import Change, Guest
from megatron_zbpp.guests.freeze_run import FreezeRun
from megatron_zbpp.guests.tracing import Tracer
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.techniques.vocabulary.place import (
    hosts_like,
    with_embedding,
    with_shard_times,
    with_shards,
)

FIRST, PLANNED = build('zb-h1', 2, 4), build('1f1b', 2, 4)
COSTS = Costs.uniform(FIRST.placement)


class Listening(Guest):
    """Notes what it hears."""

    def __init__(self):
        self.heard = []

    def after(self, iteration, run):
        self.heard.append('after')

    def changed(self, change):
        self.heard.append(change)


class Switching(Listening):
    """Asks for a change once."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def after(self, iteration, run):
        super().after(iteration, run)
        change, self.change = self.change, None
        return change


def run_of(*guests, **settings):
    """A session with guests."""
    session = Session(Settings('zb-h1', **settings))
    for guest in guests:
        session.invite(guest)
    session.interval = SimpleNamespace(add=lambda iteration: None)
    return session


def test_a_change_of_schedule_is_made_and_told_to_all(monkeypatch):
    first, change = Listening(), Change(COSTS, PLANNED)
    switching = Switching(change)
    session = run_of(first, switching)
    assert session.programs.schedule(2, 4).passes == FIRST.passes
    session.on_iteration_end(SimpleNamespace())
    assert session.programs.schedule(2, 4) is PLANNED
    session.on_iteration_end(SimpleNamespace())
    assert first.heard == switching.heard == ['after', change, 'after']
    session = run_of(Switching(Change(COSTS)))
    planned = []
    monkeypatch.setattr(session.programs, 'copy_what_is_free', planned.append)
    session.on_iteration_end(SimpleNamespace())
    assert planned == [COSTS]


def test_one_of_a_kind():
    """The latest; a guest says what it needs by joining."""

    class Joining(Listening):
        def join(self, run):
            self.heard.append(run)

    first, second, other = Joining(), Joining(), Listening()
    session = run_of(first, other, second)
    assert session.guests == [other, second] and second.heard == [session]
    # whether any wants bytes counted, and which of them fills its gaps
    session = run_of(Listening())
    assert not session.counting and session.filler is None
    filling = Switching(None)
    filling.counting, filling.filler = True, object()
    session.invite(filling)
    assert session.counting and session.filler is filling.filler


@pytest.mark.parametrize(
    ('settings', 'names'),
    [
        ({}, []),
        ({'trace_dir': True, 'offload': 'auto'}, ['Tracer', 'OffloadTuner']),
        ({'freeze': True, 'trace_dir': True}, ['FreezeRun', 'Tracer']),
        ({'schedule': 'auto', 'trace_dir': True}, ['Tracer', 'AutoPlan']),
    ],
    ids=lambda value: '+'.join(value) or 'nobody',
)
def test_who_is_asked_for(settings, names, tmp_path):
    values = {'trace_dir': tmp_path, 'freeze': FreezePlan(FIRST, (), 1.0, 1.0)}
    settings = {key: values[key] if value is True else value for key, value in settings.items()}
    session = Session(Settings(**settings))
    assert [type(guest).__name__ for guest in session.guests] == names
    for guest in session.guests:
        assert (guest is session.store.left_out) == (type(guest).__name__ == 'FreezeRun')


def test_freezing_refuses_a_schedule_that_it_was_not_planned_for():
    """In Megatron's ranks or the paper's; not in one that only evaluates."""
    plan = FreezePlan(build('zb-v', 2, 4), (), 1.0, 1.0)
    session = Session(Settings('zb-v', freeze=plan))
    assert session.programs.lowered(2, 4, forward_only=False)
    assert session.programs.lowered(2, 6, forward_only=True)
    with pytest.raises(ValueError, match=r'planned for zb-v of 2 ranks and 4 micro.*of 2 and 6 is'):
        session.programs.lowered(2, 6, forward_only=False)


# ---- Searches beside the training: a plan and a partition, from another process and from this one.


def searched(search: partial[str]) -> str:
    """The answer of another process."""
    search_process = BackgroundSearch('the search', search, 60, pytest.fail)
    search_process._process.wait()
    assert search_process.ended()
    return search_process.answer()


@pytest.mark.parametrize('objective', ['makespan', 'window'])
def test_a_schedule(monkeypatch, tmp_path, objective):
    """Within the limit, on the placement that was asked for."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    placement = Placement.v(2)
    costs = Costs.uniform(placement, 10, 12, 8, comm=1)
    start = build('zb-v', 2, 4)
    text = searched(partial(schedule_text, start, costs, 1.5, 0.2, objective))
    found = Schedule.from_json(text)
    check(found)
    assert found.placement == placement and found.num_microbatches == 4
    assert max(peak(found, costs)) <= 1.5


@pytest.mark.parametrize('both', [False, True])
def test_a_schedule_with_shards(both):
    """Of the same passes, and as good as each named schedule for these times and this limit."""
    start = with_shards(build('zb-v', 4, 8))
    start = with_embedding(start) if both else start
    plain = Costs.uniform(start.placement, 10, 12, 8, comm=1)
    costs = with_shard_times(plain, start.placement, 0.6)
    found = Schedule.from_json(searched(partial(schedule_text, start, costs, 3.5, 0.2, 'makespan')))
    check(found)
    assert found.graph == start.graph and found.placement == start.placement
    assert max(peak(found, costs)) <= 3.5 < max(peak(start, costs))
    named = [*hosts_like(start, costs, 3.5)]
    assert [each.name.partition(' ')[0] for each in named] == ['v-half', 'v-min']
    assert len([*hosts_like(start, costs)]) == 3
    least = min(simulate(each, costs).makespan for each in named)
    assert simulate(found, costs).makespan <= least


def test_a_partition_with_multi_token_prediction_is_on_a_loop():
    ends = Layer('m', 2, 2, 2), Layer('L', 1, 1, 1)
    layers = Layers((Layer('E'), *[Layer('t', 1, 1, 1)] * 8, *ends))
    search = partial(partition_text, layers, Devices.alike(4), 4, None, 0.2, 'makespan')
    plan = json.loads(searched(search))
    assert Schedule.from_object(plan['schedule']).placement.is_loop


# ---- The file of stages that a trace leaves: commands simulate and profile by its messages.


@pytest.fixture
def trace(tmp_path):
    """A trace whose last hops take longer than others of the same ranks, and how long it took."""
    schedule = build('zb-v', 2, 6)
    costs = replace(Costs.uniform(schedule.placement, comm=0.25), hops=[(0, 0), (0, 0), (1, 1)])
    measured = simulate(schedule, costs)
    tracer = Tracer(tmp_path)
    tracer.draw(measured)
    return tmp_path / 'stages.json', measured.makespan


def test_simulated_as_it_was(trace, tmp_path, zbpp):
    """Also as `profile` hands it on."""
    file, took = trace

    def simulated(times) -> float:
        shape = '--schedule zb-v --pp 2 --microbatches 6'
        return zbpp(f'simulate {shape} --times {times} --json')['makespan']

    stages = json.loads(file.read_text())
    assert stages['hops'] == [[0, 0], [0, 0], [1, 1]] and stages['routes'] == [[0, 1, 1, 0]]
    assert simulated(file) == pytest.approx(took)
    del stages['hops']
    (tmp_path / 'old.json').write_text(json.dumps(stages))
    assert simulated('old.json') < took - 1
    zbpp(f'profile {file} --layout Et|t|t|tL -o layers.json --write-times again.json')
    assert json.loads((tmp_path / 'again.json').read_text())['routes'] == [[0, 1, 1, 0]]
    assert simulated('again.json') == pytest.approx(took)


SCHEDULE = build('zb-h1', 2, 2)
RATIOS = tuple((p, 0.5) for order in SCHEDULE.passes for p in order if p.kind == 'W')
PLAN = FreezePlan(SCHEDULE, RATIOS, 8.0, 10.0, warm_up=3, unit=30)


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
    # then steps count on from there, in the phase and with the draws of an unbroken run
    run = FreezeRun(PLAN, lambda message: None)
    run.resume(130)
    iteration = SimpleNamespace(extent=lambda: SimpleNamespace(window=0.1))
    for step in (130, 131):
        run.before(None)
        assert run.step == step and run((1, 0, 0), 4) == PLAN.left_out(step, 1, 0, 4) != frozenset()
        run.after(iteration, None)
    assert run.first == 130
    # from a checkpoint: in the phase of its step, with nothing to compare with
    said, out, _ = ran(40, first=200)
    assert [step for step, _ in said] == [200]
    assert set(out) == {2}
