"""Every two techniques: either they run to the bit, or one table refuses the pair, everywhere."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from refused_settings import refused
from stages import Pipeline, require_same

from megatron_zbpp import Costs, build
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import Schedule, Task
from megatron_zbpp.techniques import ASKED, NAMES, find
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.composition import (
    ADDED,
    CLASHES,
    EMBEDDING,
    OVERLAP,
    SLICED,
    TRAINED,
    VOCABULARY,
    table,
    techniques_of,
)
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.place import with_embedding, with_shards

P, M = 4, 8
PAIRS = [*itertools.product(TRAINED, ADDED)]
SHARDS = {VOCABULARY: with_shards, EMBEDDING: with_embedding}
DOCS = Path(__file__).parents[2] / 'docs' / 'limits.md'


def added(schedule: Schedule, name: str) -> Schedule:
    """Place a technique on half of the stages, so that two of them meet and miss each other."""
    if name in SHARDS:
        return SHARDS[name](schedule)
    costs = with_copies(Costs.uniform(schedule.placement), 0.5, ('E', 'K'))
    if name == 'recompute':
        return recomputed(schedule, 'half')
    if name == 'offload':
        return offloaded(schedule, 'half', costs)
    stays = [s for s in range(schedule.num_stages) if Task('O', s) not in schedule.graph.needs]
    limits = [0.7 * held for held in peak(schedule, costs)]
    return find(name).place(schedule, stays, costs, limits)


def having(name: str) -> Schedule:
    if name == OVERLAP:
        return build('dualpipe-v', P, 2 * P, together=True)
    if name == SLICED:
        return in_slices('zb-h1', P, M, 2)
    if name == EMBEDDING:
        return with_embedding(having(VOCABULARY))
    return added(build('interleaved', P, M), name)


@pytest.mark.on_ranks(P)
@pytest.mark.parametrize(
    'pair',
    [
        pair
        for pair in PAIRS
        if pair[0] != SLICED
        and (pair not in CLASHES or pair[0] == OVERLAP)
        and not set(pair) & SHARDS.keys()
    ],
    ids='+'.join,
)
def test_to_the_bit(pair):
    """Passes of pairs run one after the other here, as where no flag makes a model join them. Those
    with shards train in `tests/megatron/test_vocabulary_training.py`, those of slices in
    `test_sliced_models.py`."""
    first, second = pair
    schedule = added(having(first), second)
    assert techniques_of(schedule) == {first, second} - {OVERLAP}
    check(schedule)
    pipeline = Pipeline(schedule)
    pipeline.run()
    require_same(schedule, [pipeline.made])


@pytest.mark.parametrize(
    'pair', [pair for pair in PAIRS if pair in CLASHES and pair[0] != OVERLAP], ids='+'.join
)
def test_refused_where_it_is_placed(pair):
    clash = CLASHES[pair]
    said = f'{pair[1]}: .* has {pair[0]} already, and {clash.reason}: {clash.cure}'
    with pytest.raises(ValueError, match=said):
        added(having(pair[0]), pair[1])


def test_the_table_knows_no_other_pairs():
    assert CLASHES.keys() <= {*PAIRS}


def test_shards_are_not_put_between_pairs_that_run_as_one():
    with pytest.raises(ValueError, match=CLASHES[OVERLAP, VOCABULARY].reason):
        added(having(OVERLAP), VOCABULARY)


@pytest.mark.parametrize('name', ADDED)
def test_refused_beside_pairs_that_run_as_one(name):
    """Megatron's arguments are asked, by all who ask: there pairs run as one."""
    clash = CLASHES[OVERLAP, name]
    asked = SimpleNamespace(overlap_moe_expert_parallel_comm=True)
    found = refused(asked, techniques={name}, joins=True)
    assert [each.reason for each in found] == [clash.reason]
    assert not refused(asked, joins=True)


def test_the_docs_have_the_table():
    assert table() in DOCS.read_text()


def test_a_user_may_ask_for_what_has_an_amount():
    assert [name for name in NAMES if find(name).request] == [*ASKED]
