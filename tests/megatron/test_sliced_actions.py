"""Slices of sequences that run again, or are elsewhere between F and B: to the bit as without."""

from dataclasses import replace

import pytest
from grids import grid
from models import MICROBATCHES, Job, assert_same, train
from nvidia import needs_training, run
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.slices.balance import Attention, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing, sized
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


def leave(ranks, data, folder, schedule, early=False, **of_job):
    """What a schedule leaves on each rank."""
    file = folder / f'{len([*folder.iterdir()])}.json'
    file.write_text(schedule.to_json())
    job = Job(file=str(file), **{'te': False, **of_job})
    return ranks(job.pp).run(train, job, job.argv('', early, data))


def compare(ranks, data, tmp_path, actions, schedule, early=False, **of_job):
    """Train with these and without: to the bit, and what is asked for happens."""
    plain, found = (
        leave(ranks, data, tmp_path, plan(schedule, evicts), early, **of_job, **asked)
        for asked, evicts in (({}, False), (ASKED[actions], 'evict' in actions))
    )
    assert_same(found, plain)
    assert (actions != 'recompute') == any(rank.moved for rank in found)
    assert not early or any(rank.early for rank in found)


@supports('slices of sequences as without {actions}', '{schedule}')
@grid(
    actions=('recompute+offload', 'evict', 'recompute'),
    schedule=('zb-v', '1f1b', 'interleaved'),
    dropout=(0.0, 0.1, 0.1),
)
def test_to_the_bit(ranks, data, tmp_path, actions, schedule, dropout):
    """Keys and values stay; slices run again with those of the slices before, last slice first."""
    compare(ranks, data, tmp_path, actions, schedule, dropout=dropout)


@pytest.mark.full
@supports('slices of sequences as without {actions}', '{schedule}')
@grid(actions=('offload', 'recompute+evict'), schedule=('zb-h1', 'zb-v', 'gpipe'))
def test_every_one(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, dropout=0.1)


@pytest.mark.full
@supports(
    'slices of sequences as without {actions}: optimizer steps that do not wait', '{schedule}'
)
@grid(actions=('recompute', 'offload', 'evict'), schedule=('zb-h1',))
def test_forwards_ahead(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, early=True)


@pytest.mark.full
@supports('slices of sequences as without {action}: planned', 'by `zbpp plan`')
@grid(action=('offload', 'recompute', 'evict'))
def test_planned(ranks, data, tmp_path, action):
    """Of uneven slices, on two stages a rank; the same slices in the order of a name leave it."""
    graph, placement = Slicing(3, (6, 5, 5)), Placement.v(2)
    costs = with_copies(Costs.uniform(placement), 0.2, ('E', 'K'))
    costs = costs.with_times(R=costs.times['F']).with_amounts(input=(0.02,) * 4)
    costs = in_parts(costs, graph.sizes, Attention())
    limits = (0.8, 2.5) if action == 'evict' else 0.9
    asked = {'actions': (action,), 'memory_limit': limits, 'seconds': 0.5, 'graph': graph}
    made = plan_within([(placement, costs)], MICROBATCHES, **asked).schedule
    assert {p.kind for _, p in made} >= {{'recompute': 'R', 'offload': 'L', 'evict': 'E'}[action]}
    plain = in_slices('zb-v', 2, MICROBATCHES, 3)
    plain = replace(plain, graph=sized(plain.graph, graph.sizes))
    kept, found = (leave(ranks, data, tmp_path, schedule) for schedule in (plain, made))
    assert_same(found, kept)
    assert (action != 'recompute') == any(rank.moved for rank in found)


@pytest.mark.te
@pytest.mark.full
@supports("slices of sequences as without {actions}: {kind} of Transformer Engine's", 'zb-v')
@grid(actions=('recompute+offload', 'evict', 'recompute'), kind=('SwiGLU', 'MLA', 'dense'))
def test_te_layers(te_ranks, data, tmp_path, actions, kind):
    compare(te_ranks, data, tmp_path, actions, 'zb-v', kind=kind, te=True, fused=True)


@pytest.mark.full
@supports("NVIDIA's loop: slices of sequences as without {actions}", 'zb-v')
@needs_training
@grid(actions=('--pipeline-recompute 1 --pipeline-offload all', '--pipeline-recompute all'))
def test_nvidias_loop(ranks, actions):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 3, '--pipeline-slices', 4]
    plain = run(ranks(2), *flags, '--pipeline-schedule', 'zb-v')
    found = run(ranks(2), *flags, '--pipeline-schedule', 'zb-v', *actions.split())
    assert found.losses == plain.losses and found.parameters == plain.parameters


@pytest.mark.full
@supports('slices of sequences as by 1f1b: GPT on 4 ranks', 'bpipe')
def test_bpipe(ranks, data, tmp_path):
    """Named, with slices: it evicts, and leaves what 1F1B in the same slices does."""
    plain, found = (
        leave(ranks, data, tmp_path, in_slices(name, 4, MICROBATCHES, SLICES), pp=4)
        for name in ('1f1b', 'bpipe')
    )
    assert_same(found, plain)
    assert any(rank.moved for rank in found)
