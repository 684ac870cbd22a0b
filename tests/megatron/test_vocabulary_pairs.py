"""Shards of layers beside each other technique: what the table of compositions says trains."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from models import assert_same
from supported import supports
from test_vocabulary_training import BOTH, OUTPUT, few, leave, of_ranks

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques.composition import (
    ADDED,
    CLASHES,
    EMBEDDING,
    SLICED,
    TRAINED,
    VOCABULARY,
    techniques_of,
)
from megatron_zbpp.techniques.evict.place import with_eviction
from megatron_zbpp.techniques.vocabulary.place import with_embedding, with_shards

pytestmark = pytest.mark.shared
LAYERS = {VOCABULARY: OUTPUT, EMBEDDING: BOTH}
PAIRS = [
    pair
    for pair in itertools.product(TRAINED, ADDED)
    if LAYERS.keys() & {*pair} and pair not in CLASHES
]
HOST, SLICES = 'zb-v', 4
# `test_vocabulary_training.py` has more cases of the others
CASES = [pytest.param(*pair, marks=() if 'evict' in pair else pytest.mark.full) for pair in PAIRS]


@pytest.fixture(scope='module')
def trained(ranks, data):
    """`trained(job, schedule, slices, layers, **techniques)`: what it leaves; trained once."""
    return functools.cache(functools.partial(leave, ranks, data))


def evicting(layers, job, folder):
    """A file of a schedule with shards that keeps some of a rank's activations on its partner."""
    schedule = with_shards(build(HOST, job.pp, job.microbatches))
    schedule = with_embedding(schedule) if layers == BOTH else schedule
    costs = Costs.uniform(schedule.placement).with_times(S=(0.0,) * 6, T=(0.0,) * 6)
    limits = [0.6 * peak(schedule, costs)[0], *(99.0,) * (job.pp - 1)]
    made = with_eviction(schedule, range(schedule.num_stages), costs, limits)
    assert 'evict' in techniques_of(made)
    file = folder / 'evicting.json'
    file.write_text(made.to_json())
    return str(file)


@supports('{has}, beside {added}: GPT', HOST)
@pytest.mark.parametrize(('has', 'added'), CASES)
def test_to_the_bit(trained, tmp_path, has, added):
    """As the output layer on all ranks by itself, in the same slices, under another schedule."""
    pair, job = (has, added), few()
    own = job
    layers = BOTH if EMBEDDING in pair else OUTPUT
    slices = SLICES if SLICED in pair else None
    if 'evict' in pair:
        own = replace(job, file=evicting(layers, job, tmp_path))
    more = {name: 'all' for name in pair if name in ASKED}
    found = trained(own, HOST, slices, layers, False, **more)
    plain = trained(job, '1f1b', slices, layers, False)
    assert_same(of_ranks(found, layers), of_ranks(plain, layers), job.iterations)
