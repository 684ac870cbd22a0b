"""Slices of sequences that run again, or are elsewhere between F and B: to the bit as without."""

from __future__ import annotations

import pytest
from grids import grid
from models import MICROBATCHES, Job, assert_same, train
from supported import supports

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.slices.place import in_slices

SLICES = 4


def plan(name, evicts):
    """A schedule of slices; the first rank holds less than it takes, where it evicts."""
    plain = in_slices(name, 2, MICROBATCHES, SLICES)
    if not evicts:
        return plain
    costs = Costs.uniform(plain.placement)
    made = with_eviction(plain, range(plain.num_stages), costs, [0.6 * peak(plain, costs)[0], 99.0])
    assert any(p.kind == 'E' for _, p in made)
    return made


ASKED = {
    'recompute': {'again': 'all'},
    'offload': {'offload': 'all'},
    'recompute+offload': {'again': '1', 'offload': 'all'},
    'evict': {},
    'recompute+evict': {'again': '1'},
}


def compare(ranks, data, tmp_path, actions, schedule, dropout, early=False):
    """Train with these and without, and return what both have left."""
    left = []
    for asked, evicts in (({}, False), (ASKED[actions], 'evict' in actions)):
        file = tmp_path / f'{len(left)}.json'
        file.write_text(plan(schedule, evicts).to_json())
        job = Job(te=False, dropout=dropout, file=str(file), **asked)
        left.append(ranks(2).run(train, job, job.argv('', early, data)))
    plain, found = left
    assert_same(found, plain)
    assert (actions != 'recompute') == any(rank.moved for rank in found)
    assert not early or any(rank.early for rank in found)


@supports('slices of sequences with {actions}', '{schedule}')
@grid(
    actions=('recompute+offload', 'evict', 'recompute'),
    schedule=('zb-v', '1f1b', 'interleaved'),
    dropout=(0.0, 0.1, 0.1),
)
def test_to_the_bit(ranks, data, tmp_path, actions, schedule, dropout):
    """Keys and values stay; slices run again with those of the slices before, last slice first."""
    compare(ranks, data, tmp_path, actions, schedule, dropout)


@pytest.mark.full
@supports('slices of sequences with {actions}', '{schedule}')
@grid(actions=('offload', 'recompute+evict'), schedule=('zb-h1', 'zb-v', 'gpipe'))
def test_every_one(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, 0.1)


@pytest.mark.full
@supports('slices of sequences with {actions}: optimizer steps that do not wait', '{schedule}')
@grid(actions=('recompute', 'offload', 'evict'), schedule=('zb-h1',))
def test_forwards_ahead(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, 0.0, early=True)
