"""The banner: layers that are not equal, and what Megatron's own schedule has no run of."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_zbpp import Costs, build
from megatron_zbpp.mcore.layout import StageLayout
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.techniques.asynchronous_steps import StageNorms
from megatron_zbpp.mcore.training_log import lines
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.techniques.vocabulary.place import with_shards

pytestmark = [pytest.mark.one_release, pytest.mark.on_ranks(1)]


def told(schedule, p, m, layout=None):
    """The banner of a schedule, whose model may have a layout."""
    made = build(schedule, p, m)
    plan = None if layout is None else StageLayout(made.placement, layout)
    return lines(made, SimpleNamespace(num_layers=8, pipeline_model_parallel_layout=plan))


@pytest.mark.parametrize(
    ('schedule', 'p', 'm', 'more'),
    [('interleaved', 2, 5, True), ('interleaved', 2, 6, False), ('1f1b', 2, 5, False)],
)
def test_what_stock_refuses(schedule, p, m, more):
    """Said in one line: Megatron's takes multiples of p only."""
    found = told(schedule, p, m)
    said = [line for line in found if "Megatron's own interleaved schedule refuses them" in line]
    assert len(said) == more
    assert all(line.startswith(f'{m} microbatches are no mult') for line in said)


def test_unequal_layers():
    even = told('zb-v', 2, 4, 'Ett|tt|tt|ttL')
    assert even[2] == told('zb-v', 2, 4)[2]
    uneven = told('zb-v', 2, 4, 'Ett|t|tt|tttL')
    assert 'simulated with F = B = W, by layers: idle GPU time ' in uneven[2]
    assert uneven[2].partition('time')[2] != even[2].partition('time')[2]
    assert 'less time than 1f1b' in even[2]


def test_shards_are_compared_with_the_whole_layer():
    """Both have the output layer; without its times shards had seemed to gain nothing."""
    made = with_shards(build('zb-v', 2, 4))
    _, _, said, _ = lines(made, SimpleNamespace(num_layers=8))
    assert said.startswith('simulated with F = B = W, shards 0.2: idle GPU time 3.4%, ')
    # 4 microbatches of the last rank, and the first rank's passes before and behind them
    rival, own = 4 * 3 * 1.4 + 3, 14.9
    assert said.endswith(
        f'{1 - own / rival:.1%} less time than 1f1b with the whole output layer on its last rank'
    )


def test_a_plan_is_told_by_its_own_costs():
    """Its second stage takes four times as long."""
    costs = Costs.of([1, 4], [1, 4], [1, 4], activation=[8, 8])
    made = replace(build('zb-h1', 2, 4), costs=costs)
    found = lines(made, SimpleNamespace(num_layers=8))
    assert 'simulated with the costs of the plan: idle GPU time 38.8%' in found[2]
    assert found[3] == 'simulated memory: 16 in the unit of the plan'


def test_an_asynchronous_schedule_says_that_it_trains_another_model():
    """With the age of weights and the copies by stage, and the microbatches of a call."""
    first, _, late, _ = told('pipedream', 4, 2)
    assert first.endswith('4 ranks x 1 chunks, 2 microbatches')
    assert late.startswith('asynchronous, trains another model than 1F1B: weights of forwards are')
    assert 'are 1.5 1 0.5 0 steps old' in late and 'there are 3 2 2 1 copies' in late
    assert late.endswith('each step makes the weights of the next forward')
    _, _, late, _ = told('pipedream-2bw', 4, 4)
    assert late.endswith('norm and success in the log are of the step before')


def test_whose_norm_clips_is_told():
    said = []
    log = logging.getLogger('megatron_zbpp.job')
    with mock.patch.object(log, 'handle', lambda record: said.append(record.getMessage())):
        for refused in ([], ['embeddings are tied']):
            StageNorms(Session(Settings('paci')), EndlessTraining()).decide(refused)
    own, of_all = said
    assert own.startswith('gradients are clipped by the norm of their own stage')
    assert '--pipeline-clip global clips by that of all' in own
    assert of_all.endswith('for which each step waits: embeddings are tied')
