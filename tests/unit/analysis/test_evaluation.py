"""Evaluations: an order that is made for forwards alone."""

from __future__ import annotations

from random import Random

import oracle
import pytest
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import in_flight

from megatron_zbpp.analysis.checker import check, is_mirrored
from megatron_zbpp.analysis.evaluation import evaluation
from megatron_zbpp.analysis.lowering import lower, usual_costs
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build, own_families
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.place import with_embedding, with_shards

FAMILIES = [each.name for each in own_families(every=True) if not each.asynchronous]
PLACEMENTS = (
    Placement.loop(3, 2),
    Placement.v(2),
    Placement.wave(2, 3),
    Placement((1, 0, 0, 1, 0)),
)

ROUNDING = 1e-12  # sums of times have other orders


def times_ideal(schedule):
    """Time over that of the busiest rank, if stages and messages take what programs assume."""
    timeline = simulate(schedule, Costs.uniform(schedule.placement, comm=0.01))
    return timeline.makespan / max(map(timeline.busy, range(schedule.num_ranks)))


def require_in_order(schedule, evaluated):
    """It runs the same forwards, deadlock-free, and each stage's in the order of microbatches."""
    check(evaluated)
    for own, order in zip(schedule.forward_only().passes, evaluated.passes, strict=True):
        assert sorted(own) == sorted(order)
        for stage in {p.stage for p in order}:
            own = [(p.microbatch, p.slice) for p in order if (p.kind, p.stage) == ('F', stage)]
            assert own == sorted(own)


@grid(name=FAMILIES, size=((2, 3), (4, 8), (4, 6), (6, 7), (8, 32)))
def test_every_family(name, size):
    """It is never slower than the order that was made for backwards, nor are more messages open."""
    try:
        schedule = build(name, *size)
    except ValueError:
        pytest.skip('the family does not know this size')
    before, evaluated = schedule.forward_only(), evaluation(schedule)
    require_in_order(schedule, evaluated)
    assert times_ideal(evaluated) <= times_ideal(before)
    assert in_flight(lower(evaluated))[1] <= max(1, in_flight(lower(before))[1])
    assert is_mirrored(evaluated) >= is_mirrored(before)


@pytest.mark.parametrize(('name', 'before', 'after'), [
    ('v-half', 2.096, 1.240), ('v-min', 2.852, 1.240), ('1f1b-v', 2.724, 1.240),
    ('hanayo', 1.956, 1.240), ('zb-v', 1.236, 1.236), ('gis-h', 1.632, 1.122),
    ('po', 1.717, 1.122), ('interleaved', 1.122, 1.122), ('1f1b', 1.221, 1.221),
    ('chimera', 1.765, 1.198), ('gems', 8.070, 1.198), ('bitpipe', 1.399, 1.113),
])  # fmt: skip
def test_it_takes_what_forwards_take(name, before, after):
    schedule = build(name, 8, 32)
    assert times_ideal(schedule.forward_only()) == pytest.approx(before, abs=5e-4)
    assert times_ideal(evaluation(schedule)) == pytest.approx(after, abs=5e-4)


@grid(name=('1f1b', 'zb-v', 'v-min', 'interleaved'), cut=(1, 3), embedding=(False, True))
def test_shards_of_the_vocabulary_and_slices(name, cut, embedding):
    schedule = with_shards(in_slices(name, 4, 8, cut))
    schedule = with_embedding(schedule) if embedding else schedule
    evaluated = evaluation(schedule)
    require_in_order(schedule, evaluated)
    before, after = (
        simulate(each, usual_costs(each)).makespan for each in (schedule.forward_only(), evaluated)
    )
    assert after <= before * (1 + ROUNDING)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(PLACEMENTS), st.integers(1, 5))
def test_any_plan(seed, placement, m):
    """A user's own order, on any placement."""
    schedule = oracle.random_schedule(Random(seed), placement, m)
    evaluated = evaluation(schedule)
    require_in_order(schedule, evaluated)
    assert times_ideal(evaluated) <= times_ideal(schedule.forward_only()) * (1 + ROUNDING)
