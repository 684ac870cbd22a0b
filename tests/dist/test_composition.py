"""Every two techniques: either they run to the bit, or one table refuses the pair, everywhere."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from refused_settings import refused
from stages import CPU, WIDTH, LinearStage, Pipeline, require_same

from megatron_zbpp import Costs, build
from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, Task, chain
from megatron_zbpp.runtime.channels import Message
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
from megatron_zbpp.techniques.slices.graph import sliced
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
        return schedule_of(ORDERS['seq1f1b-zb'])
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
    with shards train in `tests/megatron/test_vocabulary_training.py`."""
    first, second = pair
    schedule = added(having(first), second)
    assert techniques_of(schedule) == {first, second} - {OVERLAP}
    check(schedule)
    pipeline = Pipeline(schedule)
    pipeline.run()
    require_same(schedule, [pipeline.made])


@pytest.mark.parametrize('name', NAMES)
def test_slices_to_the_bit(ranks, name):
    """What a slice has saved is made again, or is elsewhere meanwhile; others wait for it."""
    assert (SLICED, name) not in CLASHES
    schedule = added(having(SLICED), name)
    assert techniques_of(schedule) == {SLICED, name}
    results = ranks(2).run(execute, schedule)
    require_in_turn(schedule, results)
    assert name == 'recompute' or all(any(moved.values()) for _, moved in results)


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


# ---- Slices of sequences: each reads what the slices before it left.


MICROBATCHES, SIZES = 2, (3, 1)  # rows of each slice
# of two ranks, microbatches and slices: by name, the order of each rank (SlimPipe, Seq1F1B)
ORDERS = {
    'seq1f1b': [
        '0F0.0 0F0.1 0F1.0 0BW0.1 0F1.1 0BW0.0 0BW1.1 0BW1.0',
        '1F0.0 1F0.1 1BW0.1 1F1.0 1BW0.0 1F1.1 1BW1.1 1BW1.0',
    ],
    'seq1f1b-zb': [
        '0F0.0 0F0.1 0F1.0 0B0.1 0W0.1 0F1.1 0B0.0 0W0.0 0B1.1 0W1.1 0B1.0 0W1.0',
        '1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1W0.1 1F1.1 1B1.1 1W0.0 1B1.0 1W1.1 1W1.0',
    ],
    'seq1f1b-interleaved': [
        '0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2BW0.1 2F1.0 2BW0.0 2F1.1 0BW0.1 0BW0.0 2BW1.1'
        ' 2BW1.0 0BW1.1 0BW1.0',
        '1F0.0 1F0.1 3F0.0 3F0.1 3BW0.1 1F1.0 3BW0.0 1F1.1 1BW0.1 3F1.0 1BW0.0 3F1.1 3BW1.1'
        ' 3BW1.0 1BW1.1 1BW1.0',
    ],
}


def schedule_of(texts, microbatches=MICROBATCHES):
    orders = tuple(tuple(map(Pass.parse, text.split())) for text in texts)
    stages = 1 + max(p.stage for order in orders for p in order)
    placement = Placement.loop(len(orders), stages // len(orders))
    graph = sliced(chain(stages), len(SIZES))
    made = Schedule('sliced', placement, microbatches, orders, graph=graph)
    check(made)
    return made


class PrefixStage(LinearStage):
    """Adds to each row the sum of the rows before it, in the slices before its own, too."""

    def __init__(self, *args):
        super().__init__(*args)
        self.starts, self.first = self.first, False  # inputs are made here
        self.before = {}  # by microbatch and slice, what its forward took
        self.after = {}  # what it left for the next

    def forward(self, p, received):
        if self.starts:
            rows = torch.arange(self.rows_of(p.slice)) + sum(SIZES[: p.slice])
            received = 0.1 * (p.microbatch + 1 + rows)[:, None].expand(-1, WIDTH)
        here = p.microbatch, p.slice
        start = self.after[p.microbatch, p.slice - 1].detach() if p.slice else torch.zeros(WIDTH)
        self.before[here] = start.requires_grad_()
        sums = received.cumsum(0) + start
        self.after[here] = sums[-1]
        return super().forward(p, sums)

    def rows_of(self, part):
        return SIZES[part]

    def backward(self, p, received, output, gradient):
        here = p.microbatch, p.slice
        outputs, gradients = [output], [gradient]
        if p.slice + 1 < len(SIZES):
            outputs.append(self.after[here])
            gradients.append(self.before.pop((p.microbatch, p.slice + 1)).grad)
        torch.autograd.backward(outputs, gradients)
        return None if received is None else received.grad


def execute(schedule):
    """Runs on each rank: losses and gradients by stage, and bytes that left."""
    messages = [Message((rows, WIDTH), torch.float32, CPU) for rows in SIZES]
    programs = check(schedule).programs
    pipeline = Pipeline(schedule, programs=programs, stage_class=PrefixStage, message=messages)
    record = pipeline.run()
    assert tuple(record.passes) == schedule.passes[pipeline.rank] and record.live[-1] == 0
    return pipeline.made, pipeline.moved


def in_turn(num_stages):
    """The same slices on one process: all forwards of a microbatch, then its backwards."""
    stages = [PrefixStage(None, stage, num_stages) for stage in range(num_stages)]
    for microbatch in range(MICROBATCHES):
        kept = {}
        for part in range(len(SIZES)):
            value = None
            for index, stage in enumerate(stages):
                received = None if value is None else value.detach().requires_grad_()
                value = stage.forward(Pass(F, index, microbatch, part), received)
                kept[index, part] = received, value
        for part in reversed(range(len(SIZES))):
            gradient = None
            for index in reversed(range(num_stages)):
                p = Pass(B, index, microbatch, part)
                gradient = stages[index].backward(p, *kept[index, part], gradient)
    return [(stage.losses, [p.grad for p in stage.parameters()]) for stage in stages]


def require_in_turn(schedule, results):
    expected = in_turn(schedule.num_stages)
    for found, _ in results:
        for stage, (losses, gradients) in found.items():
            assert losses == expected[stage][0]
            assert all(map(torch.equal, gradients, expected[stage][1]))


@pytest.mark.parametrize('name', ORDERS)
def test_slices_of_sequences(ranks, name):
    """As the same slices in turn."""
    schedule = schedule_of(ORDERS[name])
    require_in_turn(schedule, ranks(2).run(execute, schedule))


@pytest.mark.on_ranks(1)
def test_a_slice_of_another_shape_is_named():
    order = '0F0.0 1F0.0 0F0.1 1F0.1 1BW0.1 0BW0.1 1BW0.0 0BW0.0'
    said = r'^F stage 0 microbatch 0 slice 1 made \(3, 6\) of torch.float32, but'
    rows = mock.patch.object(PrefixStage, 'rows_of', lambda self, part: SIZES[0])
    with rows, pytest.raises(ValueError, match=said):
        execute(schedule_of([order], microbatches=1))
