"""The banner: layers that are not equal, and what Megatron's own schedule has no run of."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.one_release


def told(schedule, p, m, layout=None):
    """The banner of a schedule, whose model may have a layout."""
    from types import SimpleNamespace

    from megatron_zbpp import build
    from megatron_zbpp.mcore.iteration.announcement import lines
    from megatron_zbpp.mcore.layout import StageLayout

    made = build(schedule, p, m)
    plan = None if layout is None else StageLayout(made.placement, layout)
    return lines(made, SimpleNamespace(num_layers=8, pipeline_model_parallel_layout=plan))


@pytest.mark.parametrize(
    ('schedule', 'p', 'm', 'more'),
    [('interleaved', 2, 5, True), ('interleaved', 2, 6, False), ('1f1b', 2, 5, False)],
)
def test_what_stock_refuses(ranks, schedule, p, m, more):
    """Said in one line: Megatron's takes multiples of p only."""
    found = ranks(2).run(told, schedule, p, m)[0]
    said = [line for line in found if "Megatron's own interleaved schedule refuses them" in line]
    assert len(said) == more
    assert all(line.startswith(f'{m} microbatches are no mult') for line in said)


def test_unequal_layers(ranks):
    even = ranks(2).run(told, 'zb-v', 2, 4, 'Ett|tt|tt|ttL')[0]
    assert even[2] == ranks(2).run(told, 'zb-v', 2, 4)[0][2]
    uneven = ranks(2).run(told, 'zb-v', 2, 4, 'Ett|t|tt|tttL')[0]
    assert 'simulated with F = B = W, by layers: idle GPU time ' in uneven[2]
    assert uneven[2].partition('time')[2] != even[2].partition('time')[2]
    assert 'less time than 1f1b' in even[2]


def test_shards_are_compared_with_the_whole_layer(ranks):
    """Both have the output layer; without its times shards had seemed to gain nothing."""
    (_, _, said, _), *_ = ranks(2).run(told_of_shards)
    assert said.startswith('simulated with F = B = W, shards 0.2: idle GPU time 3.4%, ')
    # 4 microbatches of the last rank, and the first rank's passes before and behind them
    rival, own = 4 * 3 * 1.4 + 3, 14.9
    assert said.endswith(
        f'{1 - own / rival:.1%} less time than 1f1b with the whole output layer on its last rank'
    )


def told_of_shards():
    from types import SimpleNamespace

    from megatron_zbpp import build
    from megatron_zbpp.mcore.iteration.announcement import lines
    from megatron_zbpp.techniques.vocabulary.place import with_shards

    return lines(with_shards(build('zb-v', 2, 4)), SimpleNamespace(num_layers=8))


def told_of_a_plan():
    """The banner of a plan whose second stage takes four times as long."""
    from dataclasses import replace
    from types import SimpleNamespace

    from megatron_zbpp import Costs, build
    from megatron_zbpp.mcore.iteration.announcement import lines

    made = build('zb-h1', 2, 4)
    costs = Costs.of([1, 4], [1, 4], [1, 4], activation=[8, 8])
    return lines(replace(made, costs=costs), SimpleNamespace(num_layers=8))


def test_a_plan_is_told_by_its_own_costs(ranks):
    found = ranks(2).run(told_of_a_plan)[0]
    assert 'simulated with the costs of the plan: idle GPU time 38.8%' in found[2]
    assert found[3] == 'simulated memory: 16 in the unit of the plan'


def test_an_asynchronous_schedule_says_that_it_trains_another_model(ranks):
    """With the age of weights and the copies by stage, and the microbatches of a call."""
    first, _, late, _ = ranks(2).run(told, 'pipedream', 4, 2)[0]
    assert first.endswith('4 ranks x 1 chunks, 2 microbatches')
    assert late.startswith('asynchronous, trains another model than 1F1B: weights of forwards are')
    assert 'are 1.5 1 0.5 0 steps old' in late and 'there are 3 2 2 1 copies' in late
    assert late.endswith('each step makes the weights of the next forward')
    _, _, late, _ = ranks(2).run(told, 'pipedream-2bw', 4, 4)[0]
    assert late.endswith('norm and success in the log are of the step before')


def told_of_norms():
    """The log's lines of whose norm clips, where stages can have their own, and where not."""
    import logging
    from unittest import mock

    from megatron_zbpp.mcore.optimizer.asynchronous_steps import StageNorms
    from megatron_zbpp.mcore.session import Session
    from megatron_zbpp.mcore.settings import Settings

    said = []
    log = logging.getLogger('megatron_zbpp.job')
    with mock.patch.object(log, 'handle', lambda record: said.append(record.getMessage())):
        for refused in ([], ['embeddings are tied']):
            StageNorms(Session(Settings('paci'))).decide(refused)
    return said


def test_whose_norm_clips_is_told(ranks):
    own, of_all = ranks(2).run(told_of_norms)[0]
    assert own.startswith('gradients are clipped by the norm of their own stage')
    assert '--pipeline-clip global clips by that of all' in own
    assert of_all.endswith('for which each step waits: embeddings are tied')
