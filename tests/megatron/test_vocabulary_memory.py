"""Bytes that each rank holds with the output layer on all ranks, and on the last one alone."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
from example import forget_groups
from models import Job
from supported import TOLERANCE, supports
from test_activations import Bytes, SamplingClock
from test_sliced_models import UNTIED

from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import BW, F, Pass, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.techniques.vocabulary.graph import HIDDEN, S, T

pytestmark = pytest.mark.one_release

RANKS, MICROBATCHES, WORDS, TOKENS, WIDTH = 4, 8, 32768, 16, 32
FLOAT = 4


class BytesOfShards(Bytes):
    """Bytes that autograd, the store of weight gradients, and shards between S and T hold."""

    def __init__(self, store, parameters, shards, parts):
        super().__init__(store, parameters)
        self._shards, self._parts = shards, parts

    def count(self):
        both, graph = super().count()
        kept = [each for shard in self._shards for each in shard._kept.values()]
        tensors = [tensor for made, weights in kept for tensor in (*made, weights)]
        return both + self._sum([*tensors, *self._parts]), graph


def iteration(argv, shared):
    """One iteration on each rank: its schedule, and bytes before and after each pass."""
    import pretrain_gpt as script
    import torch

    import megatron_zbpp
    from megatron_zbpp.mcore.iteration import executors
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

    with ExitStack() as stack:
        stack.callback(forget_groups)
        stack.enter_context(mock.patch.object(script, 'VOCABULARY', WORDS))
        stack.enter_context(mock.patch.object(vocabulary, 'Shards', Known))
        stack.enter_context(mock.patch.object(vocabulary.OutputShard, '_logits', noted))
        args = script.parse_args(argv)
        layer = {'vocab_parallel': 'output'} if shared else {}
        plugin = stack.enter_context(megatron_zbpp.enable(args.pipeline_schedule, **layer))
        script.initialize(args)
        stack.enter_context(mock.patch.object(script, 'draw_weights', lambda *_: None))
        models = script.build_model(args)
        script.build_optimizer(args, models)
        data = script.iterators(args, script.build_datasets(args)[0], 0)
        parameters = [p for model in models for p in model.parameters()]
        held = BytesOfShards(plugin.session.store, parameters, shards, parts)
        clock = mock.patch.object(executors, 'clock_for', lambda *_, **__: SamplingClock(held))
        hooks = torch.autograd.graph.saved_tensors_hooks(held.pack, lambda holder: holder.tensor)
        with clock, hooks:
            script.run_batch(args, models, data)
        record = plugin.latest.record
        schedule = plugin.session.programs.schedule(RANKS, MICROBATCHES)
        marks = [(start[0], end[0]) for start, end in record.marks]
        return schedule, dict(zip(record.passes, marks, strict=True))


def planned(schedule, results):
    """Bytes by rank after each pass, as the simulator says.

    Of the layers as the first microbatch tells, of S by the shapes of what it makes.
    """
    found = {p: held for _, passes in results for p, held in passes.items()}
    stages = range(schedule.num_stages)

    def added(kind):
        passes = [Pass(kind, stage, 0) for stage in stages]
        return [found[p][1] - found[p][0] if p in found else 0 for p in passes]

    activation = added(F)
    waiting = activation if any(p.kind == BW for p in found) else [-each for each in added(W)]
    of_shard = {
        'logits': TOKENS * WORDS // RANKS * FLOAT,
        HIDDEN: TOKENS * (WIDTH + FLOAT) * FLOAT,  # and of each row target and gradient
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

    Logits are most of what it holds. Of each microbatch a rank has a shard of four, and those of
    so many at once between S and T as `shards`.
    """
    job = Job(te=False, pp=RANKS, microbatches=MICROBATCHES)
    argv = [*map(str, [*job.argv(schedule, False, data), *UNTIED])]
    most = []
    for shared in (True, False):
        results = ranks(RANKS).run(iteration, argv, shared)
        made, _ = results[0]
        by_rank = planned(made, results)
        for order, expected, (_, passes) in zip(made.passes, by_rank, results, strict=True):
            assert tuple(passes) == order
            counted = [after for _, after in passes.values()]
            assert expected == pytest.approx(counted, rel=0, abs=0.02 * max(counted))
        most += [(max(expected), max(counted))]  # of the last rank, which has the loss
    shares = [part / whole for part, whole in zip(*most, strict=True)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    assert shards / RANKS < shares[1] < shards / RANKS + 0.15
