"""How a run treats its guests: whom it invites, what it asks them, and what they may change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_zbpp.guests.base import Change, Guest
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.schedules import build

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


def test_a_change_of_schedule_is_made_and_told_to_all():
    first, change = Listening(), Change(COSTS, PLANNED)
    switching = Switching(change)
    session = run_of(first, switching)
    assert session.programs.schedule(2, 4).passes == FIRST.passes
    session.on_iteration_end(SimpleNamespace())
    assert session.programs.schedule(2, 4) is PLANNED
    session.on_iteration_end(SimpleNamespace())
    assert first.heard == switching.heard == ['after', change, 'after']


def test_a_change_of_costs_plans_copies_anew(monkeypatch):
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


def test_what_a_run_asks_its_guests():
    """Whether any wants bytes counted, and which of them fills its gaps."""
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
    fused = FreezePlan(PLANNED, (), 1.0, 1.0)
    with pytest.raises(ValueError, match='1f1b has no W passes'):
        Session(Settings('1f1b', freeze=fused)).programs.lowered(2, 4, forward_only=False)
