"""When receives are posted: fewer are in flight, fewer kernels spin beside passes, for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paths import ROOT
from programs import Timing, awaited_early, in_flight, posted_later, spinning

from megatron_zbpp.analysis.deadlock import DeadlockError, prove
from megatron_zbpp.analysis.evaluation import evaluation
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, EARLY, LATE, LATEST, RECEIVES
from megatron_zbpp.ir import Pass
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build

# by size: the mean and the most receives in flight beside a pass, early, late and latest
IN_FLIGHT = {
    ('1f1b', 8): ((0.38, 1), (0.33, 1), (0.05, 1)),
    ('1f1b', 16): ((0.38, 1), (0.35, 1), (0.02, 1)),
    ('zb-h1', 8): ((0.35, 1), (0.31, 1), (0.16, 1)),
    ('zb-h1', 16): ((0.43, 1), (0.41, 1), (0.2, 1)),
    ('zb-v', 8): ((0.8, 3), (0.68, 2), (0.55, 2)),
    ('zb-v', 16): ((1.03, 3), (0.84, 2), (0.77, 2)),
    ('dualpipe-v', 8): ((0.72, 2), (0.61, 2), (0.44, 2)),
    ('dualpipe-v', 16): ((0.91, 2), (0.76, 2), (0.58, 2)),
}
PAGE = ROOT / 'docs' / 'gpu-tips.md'


@pytest.mark.parametrize(('name', 'm'), IN_FLIGHT)
def test_fewer_receives_are_in_flight(name, m):
    schedule = build(name, 4, m)
    counted = [in_flight(lower(schedule, receives)) for receives in RECEIVES]
    assert tuple((round(mean, 2), most) for mean, most in counted) == IN_FLIGHT[name, m]


@pytest.mark.parametrize('name', ['1f1b', 'zb-h1', 'zb-2p', 'zb-v', 'dualpipe-v', 'interleaved'])
def test_the_page_says_how_long_they_spin(name):
    """Neither do sends in their place: of both, the page names the share for late receives."""
    schedule = build(name, 4, 16)
    shares = {receives: spinning(schedule, lower(schedule, receives)) for receives in RECEIVES}
    early, late, latest = (round(100 * shares[receives][0]) for receives in RECEIVES)
    either = round(100 * shares[LATE][1])
    assert f'| `{name}` | {early} | {late} | {latest} | {either} |' in PAGE.read_text()
    for of_either in (0, 1):
        parts = [shares[receives][of_either] for receives in RECEIVES]
        assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize(('message', 'most'), [(0.1, 1.045), (0.01, 1.005)])
@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h1', 'zb-v'])
def test_what_the_latest_costs(name, message, most):
    """Little, where messages are short: see the page."""
    schedule = build(name, 8, 32)
    costs = replace(Costs.uniform(schedule.placement), comm=message)
    programs = lower(schedule, LATEST)
    at_once = Timing(programs, costs, streams=False, in_order=False).makespan
    for in_order in (False, True):
        assert Timing(programs, costs, streams=True, in_order=in_order).makespan <= most * at_once


def test_only_messages_move():
    """The passes of each rank, and what it sends to whom, are the same in the same order."""
    schedule = build('zb-v', 4, 8)
    early, late = lower(schedule, EARLY), lower(schedule, LATE)
    assert early != late
    for one, other in zip(early, late, strict=True):
        assert sorted(map(repr, one)) == sorted(map(repr, other))
        assert _passes(one) == _passes(other)
        for peer in range(4):
            for kind in ('Send', 'Receive'):
                assert _messages(one, kind, peer) == _messages(other, kind, peer)


def _passes(program):
    return [i for i in program if isinstance(i, Pass)]


def _messages(program, kind, peer):
    return [i for i in program if type(i).__name__ == kind and i.peer == peer]


# messages of forwards, for how many of them a rank waits before a pass that does not take them: as
# receives are posted late, and by takers
WAITS = {
    '1f1b': (48, 24, 0),
    'zb-h1': (48, 39, 0),
    'bpipe': (48, 24, 0),
    'interleaved': (112, 104, 12),
    'zb-v': (96, 90, 33),
    'v-half': (96, 60, 2),
    'v-min': (96, 47, 1),
    'dualpipe-v': (96, 90, 32),
}


@pytest.mark.parametrize('name', WAITS)
def test_shapes_are_awaited_by_the_pass_that_takes_the_message(name):
    """Or earlier, where passes that synchronise would stop for ever."""
    schedule = build(name, 4, 16)
    by_taker = lower(schedule, BY_TAKER)
    sent, late, left = WAITS[name]
    assert awaited_early(lower(schedule, LATE)) == (late, sent)
    assert awaited_early(by_taker) == (left, sent)
    for receive, later in posted_later(by_taker):
        if receive.consumer.kind == 'F':
            with pytest.raises(DeadlockError):
                prove(later)


def test_an_evaluation_waits_for_what_it_takes():
    for name in WAITS:
        programs = lower(evaluation(build(name, 4, 16)), BY_TAKER)
        assert awaited_early(programs)[0] == (2 if name in ('zb-v', 'dualpipe-v') else 0)


def test_an_unknown_time_is_refused():
    with pytest.raises(ValueError, match="receives is 'soon': give 'early', 'late' or 'latest'"):
        lower(build('1f1b', 2, 2), 'soon')
