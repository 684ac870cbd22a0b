"""Bytes that slices of sequences, and shards of the output layer, hold on each rank at its peak."""

import weakref
from functools import partial

import pytest
import torch
from example import program
from grids import grid
from models import Job, replacements
from supported import TOLERANCE, supports
from test_activations import Bytes, weighing
from test_sliced_models import UNTIED

import megatron_zbpp
from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import BW, F, Pass, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import KV, KV_GRADIENT, R
from megatron_zbpp.mcore.lowered import for_megatron
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.vocabulary.graph import HIDDEN as STATES
from megatron_zbpp.techniques.vocabulary.graph import S, T

pytestmark = pytest.mark.one_release


MICROBATCHES, SLICES, LENGTH, HIDDEN, HEADS, LAYERS = 4, 4, 64, 64, 4, 4


class BytesOfSlices(Bytes):
    """Bytes that autograd, the store of weight gradients, and attention in slices hold."""

    def __init__(self, attending, store, parameters):
        super().__init__(store, parameters)
        self._attending = attending  # of each stage, what it keeps of microbatches under way

    def count(self):
        both, graph = super().count()
        rows = [
            each
            for kept in self._attending
            for layers in kept._rows.values()
            for pair in layers.values()
            for each in pair
        ]
        seen = {holder.tensor.untyped_storage().data_ptr() for holder in self._saved}
        buffers = [t for each in rows for t in (each.values, each.gradients) if t is not None]
        return both + self._sum([t for t in buffers if t.data_ptr() not in seen]), graph


def iteration(bytes_of, patches, argv, schedule=None, frees=True, **options):
    """One iteration on each rank: bytes before and after each pass; by stage, why bytes stay; and
    its schedule. Where it `frees`, nothing outlives it."""

    def replaced(script):
        yield from patches(script)
        yield script, 'enable', enable

    def enable(args, stack):
        plugin = megatron_zbpp.enable(schedule or args.pipeline_schedule, **options)
        return stack.enter_context(plugin)

    with program(argv, replaced) as at:
        data = at.optimizer and at.data
        parameters = [p for model in at.models for p in model.parameters()]
        held = bytes_of(at.plugin.session.store, parameters)
        with weighing(held):
            at.batch(data)
        record = at.plugin.latest.record
        assert not frees or held.count() == (0, 0), 'something outlived the iteration'
        marks = [(start[0], end[0]) for start, end in record.marks]
        stored = at.plugin.session.activations(torch.device('cpu'))
        stay = {stage: found.stayed for stage, found in stored.bytes.items()}
        sizes = at.args.pipeline_model_parallel_size, at.args.num_microbatches
        made = at.plugin.session.programs.schedule(*sizes)
        return dict(zip(record.passes, marks, strict=True)), stay, made


def iteration_of_slices(job, argv, schedule):
    from megatron_zbpp.mcore.techniques import sliced
    from megatron_zbpp.mcore.techniques.sliced_layers import Kept

    attending = weakref.WeakSet()

    def kept():
        attending.add(made := Kept())
        return made

    def patches(script):
        yield from replacements(script, job)
        yield sliced, 'Kept', kept

    return iteration(partial(BytesOfSlices, attending), patches, argv, schedule)


def trained(ranks, data, made, recompute=None):
    """What `iteration` returns of each rank."""
    job = Job(te=False, recompute=recompute)
    name = 'zb-v' if made.placement.num_chunks > 1 else '1f1b'
    argv = [*job.argv(name, False, data), '--hidden-size', HIDDEN, '--seq-length', LENGTH]
    argv += ['--num-attention-heads', HEADS, '--global-batch-size', MICROBATCHES]
    return ranks(2).run(iteration_of_slices, job, argv, made)


def of_all_tokens(made):
    """Bytes of keys and values of a microbatch in a stage, or of their gradients."""
    return 2 * (LAYERS // made.num_stages) * LENGTH * HIDDEN * 4


def amounts(found, made):
    """Costs: bytes by stage and slice. Of the first microbatch, what F, or R, adds, W gives back.
    Keys and values, and their gradients, are of the whole sequence, and wait for no slice."""
    rows, stages = float(of_all_tokens(made)), range(made.num_stages)

    def added(*kinds):
        passes = [
            [[Pass(kind, stage, 0, part) for kind in kinds] for part in range(SLICES)]
            for stage in stages
        ]
        return [
            [sum(found[p][1] - found[p][0] for p in each if p in found) for each in own]
            for own in passes
        ]

    activation = [[first - rows, *others] for first, *others in added(F, R)]
    waiting = [[-each for each in own] for own in added(W)]
    held = {'activation': activation, 'retained': waiting if any(map(any, waiting)) else activation}
    whole = {name: [sum(own) for own in each] for name, each in held.items()}
    parts = {
        name: [[part / sum(own) for part in own] for own in each] for name, each in held.items()
    }
    times, kept = [1.0] * len(stages), dict.fromkeys((KV, KV_GRADIENT), [rows] * len(stages))
    return Costs.of(times, times, times, amounts=kept, **whole).with_parts(**parts)


@grid(schedule=('zb-v', '1f1b'), again=(False, True), recompute=(None, 'selective'))
def test_live_bytes(ranks, data, schedule, again, recompute):
    """After each pass within 2 % of what the simulator says, also where slices run again.
    Megatron's own attention saves more of later slices; where it is recomputed, as much of each."""
    made = in_slices(schedule, 2, MICROBATCHES, SLICES)
    made = for_megatron(recomputed(made, 'all') if again else made)
    results = trained(ranks, data, made, recompute)
    costs = amounts({p: held for passes, *_ in results for p, held in passes.items()}, made)
    for order, planned, (passes, *_) in zip(made.passes, live(made, costs), results, strict=True):
        assert tuple(passes) == order
        counted = [after for _, after in passes.values()]
        assert max(planned) == pytest.approx(max(counted), rel=0.02)
        assert planned == pytest.approx(counted, rel=0.02, abs=0.02 * max(counted))
        assert made.placement.num_chunks * of_all_tokens(made) > 0.05 * max(counted)


def test_keys_and_values_stay(ranks, data):
    """Where slices go to the host; it is said why: of those that leave the last saves most."""
    made = offloaded(in_slices('gpipe', 2, MICROBATCHES, SLICES), 'all')
    for rank, (_, stay, _) in enumerate(trained(ranks, data, made)):
        seen = 1 + max(p.slice for p in made.passes[rank] if p.kind == 'O')
        assert stay[rank]['needed by other slices'] == of_all_tokens(made) * seen / SLICES
        assert stay[rank].get('held by others', 0) < of_all_tokens(made) / 8


RANKS, BATCHES, WORDS, TOKENS, WIDTH = 4, 8, 32768, 16, 32
FLOAT = 4


class BytesOfShards(Bytes):
    """Bytes that autograd, the store of weight gradients, and shards between S and T hold."""

    def __init__(self, shards, parts, store, parameters):
        super().__init__(store, parameters)
        self._shards, self._parts = shards, parts

    def count(self):
        both, graph = super().count()
        kept = [each for shard in self._shards for each in shard._kept.values()]
        tensors = [tensor for made, weights in kept for tensor in (*made, weights)]
        return both + self._sum([*tensors, *self._parts]), graph


def iteration_of_shards(argv, shared):
    from megatron_zbpp.mcore.techniques import split_vocabulary as vocabulary

    shards, parts = weakref.WeakSet(), weakref.WeakSet()

    class Known(vocabulary.Shards):
        def __init__(self, *of_rank):
            super().__init__(*of_rank)
            shards.add(self)

    def noted(self, *given, original=vocabulary.OutputShard._logits, **named):
        made, part = original(self, *given, **named)
        parts.update(part)
        return made, part

    def patches(script):
        yield script, 'VOCABULARY', WORDS
        yield vocabulary, 'Shards', Known
        yield vocabulary.OutputShard, '_logits', noted
        yield script, 'draw_weights', lambda *_: None

    layer = {'vocab_parallel': 'output'} if shared else {}
    return iteration(partial(BytesOfShards, shards, parts), patches, argv, frees=False, **layer)


def planned(schedule, results):
    """Bytes by rank after each pass, as the simulator says. Of the layers as the first microbatch
    tells, of S by the shapes of what it makes."""
    found = {p: held for passes, *_ in results for p, held in passes.items()}
    stages = range(schedule.num_stages)

    def added(kind):
        passes = [Pass(kind, stage, 0) for stage in stages]
        return [found[p][1] - found[p][0] if p in found else 0 for p in passes]

    activation = added(F)
    waiting = activation if any(p.kind == BW for p in found) else [-each for each in added(W)]
    of_shard = {
        'logits': TOKENS * WORDS // RANKS * FLOAT,
        STATES: TOKENS * (WIDTH + FLOAT) * FLOAT,  # and of each row target and gradient
        'gradient_part': TOKENS * 2 * WIDTH * FLOAT,
    }
    sites = [0] * len(stages) + [1] * RANKS
    own = {name: [each * size for each in sites] for name, size in of_shard.items()}
    amounts = {'activation': activation, 'retained': waiting, **own}
    times = [1.0] * len(stages)
    costs = Costs.of(times, times, times, amounts=amounts, times={S: sites, T: sites})
    return live(schedule, costs)


@supports('the output layer on all ranks: memory of each rank as planned', '{schedule}', TOLERANCE)
@pytest.mark.parametrize(('schedule', 'shards'), [('1f1b', 2), ('zb-v', 3)])
def test_memory(ranks, data, schedule, shards):
    """Within 2 % after each pass; so much less than with the whole layer holds the loss rank.
    Logits are most of what it holds. Of each microbatch a rank has a shard of four, and those of so
    many at once between S and T as `shards`."""
    job = Job(te=False, pp=RANKS, microbatches=BATCHES)
    argv = [*job.argv(schedule, False, data), *UNTIED]
    most = []
    for shared in (True, False):
        results = ranks(RANKS).run(iteration_of_shards, argv, shared)
        *_, made = results[0]
        by_rank = planned(made, results)
        for order, expected, (passes, *_) in zip(made.passes, by_rank, results, strict=True):
            assert tuple(passes) == order
            counted = [after for _, after in passes.values()]
            assert expected == pytest.approx(counted, rel=0, abs=0.02 * max(counted))
        most += [(max(expected), max(counted))]  # of the last rank, which has the loss
    shares = [part / whole for part, whole in zip(*most, strict=True)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    assert shards / RANKS < shares[1] < shards / RANKS + 0.15
