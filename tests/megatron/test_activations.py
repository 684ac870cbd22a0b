"""What the runtime counts is what autograd holds, and what the simulator says."""

from __future__ import annotations

import weakref
from unittest import mock

import numpy as np
import pytest
from example import MODEL, forget_groups

from megatron_zbpp.analysis.memory import live
from megatron_zbpp.ir import BW, B, F, W
from megatron_zbpp.ir.costs import Costs


class Bytes:
    """Bytes that autograd's graph and the weight-gradient store hold, without parameters."""

    def __init__(self, store, parameters):
        self._saved = weakref.WeakSet()
        self._store = store
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(self, tensor):
        holder = _Holder(tensor)
        self._saved.add(holder)
        return holder

    def count(self):
        """(in the graph and the store, in the graph alone)."""
        graph = [holder.tensor for holder in self._saved]
        tensors = list(graph)
        for records in self._store._pending.values():
            tensors += [tensor for deferred in records for tensor in deferred.held()]
        return self._sum(tensors), self._sum(graph)

    def _sum(self, tensors):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(s.nbytes() for at, s in storages.items() if at not in self._parameters)


class _Holder:
    def __init__(self, tensor):
        self.tensor = tensor


class SamplingClock:
    """Counts bytes whenever the executor takes the time."""

    def __init__(self, held):
        self._held = held

    def mark(self):
        return self._held.count()

    def seconds(self, mark):
        return mark


def iteration(argv):
    """One iteration on each rank: its passes, activations counted and bytes held after each."""
    import pretrain_gpt
    import torch

    import megatron_zbpp
    from megatron_zbpp.mcore.iteration import executors

    args = pretrain_gpt.parse_args(argv)
    with megatron_zbpp.enable(args.pipeline_schedule) as plugin:
        pretrain_gpt.initialize(args)
        models = pretrain_gpt.build_model(args)
        pretrain_gpt.build_optimizer(args, models)
        data = pretrain_gpt.iterators(args, pretrain_gpt.build_datasets(args)[0], 0)
        held = Bytes(plugin.session.store, [p for model in models for p in model.parameters()])
        clock = mock.patch.object(executors, 'clock_for', lambda *_, **__: SamplingClock(held))
        hooks = torch.autograd.graph.saved_tensors_hooks(held.pack, lambda holder: holder.tensor)
        with clock, hooks:
            pretrain_gpt.run_batch(args, models, data)
        sizes = args.pipeline_model_parallel_size, args.num_microbatches
        schedule = plugin.session.programs.lowered(*sizes, forward_only=False).schedule
    forget_groups()
    record = plugin.latest.record
    assert held.count() == (0, 0), 'something outlived the iteration'
    return schedule, record.live, [end for _, end in record.marks]


@pytest.mark.parametrize('m', [3, 8])
@pytest.mark.parametrize('schedule', ['1f1b', 'zb-h1', 'zb-v'])
@pytest.mark.parametrize('p', [2, 4])
def test_live_activations(ranks, data, p, schedule, m):
    argv = [*MODEL, '--num-layers', 2 * p, '--pipeline-model-parallel-size', p]
    argv += ['--pipeline-schedule', schedule, '--global-batch-size', m, '--data-path', data]
    results = ranks(p).run(iteration, list(map(str, argv)))
    schedule = results[0][0]
    chunks = schedule.placement.num_chunks
    simulated = live(schedule, Costs.uniform(schedule.placement))
    for rank, (_, counted, held) in enumerate(results):
        assert [count / chunks for count in counted] == pytest.approx(simulated[rank])
        check_bytes(schedule, rank, held)


def test_live_activations_of_two_ways(ranks, data):
    """As the published table has it: one more than there are ranks, on each of them."""
    p, m = 2, 4
    argv = [*MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', p]
    argv += ['--pipeline-schedule', 'dualpipe', '--global-batch-size', 2 * m, '--data-path', data]
    results = ranks(2 * p).run(iteration, list(map(str, argv)))
    assert [max(counted) for _, counted, _ in results] == [2 * p + 1] * 4
    for rank, (schedule, counted, held) in enumerate(results):
        assert tuple(counted) == live(schedule, Costs.uniform(schedule.placement))[rank]
        check_bytes(schedule, rank, held)


def check_bytes(schedule, rank, held):
    """Bytes are so much for each forward without its B, and less for each B without its W."""
    stages = schedule.placement.stages(rank)
    whole, waiting = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    states, bytes_held = [], []
    for p, (both, graph) in zip(schedule.passes[rank], held, strict=True):
        whole[p.stage] += 1 if p.kind == F else -1 if p.kind in (B, BW) else 0
        waiting[p.stage] += 1 if p.kind == B else -1 if p.kind == W else 0
        assert any(whole.values()) or not graph, f'{p} left {graph} bytes in the graph'
        # the last entry: what all microbatches share, such as the causal mask
        states.append([*whole.values(), *waiting.values(), float(any(whole.values()))])
        bytes_held.append(both)
    sizes, *_ = np.linalg.lstsq(np.array(states), np.array(bytes_held, float), rcond=None)
    assert np.abs(np.array(states) @ sizes - bytes_held).max() < 1, 'bytes do not follow the count'
    activation, shared = sizes[: len(stages)], sizes[-1]
    assert (activation > 10_000).all()
    if any(p.kind == W for p in schedule.passes[rank]):
        retained = sizes[len(stages) : 2 * len(stages)]
        assert (retained < 0.9 * (activation + shared)).all()
