"""`auto` measures, plans and switches while it trains, and the bits stay Megatron's."""

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import events
import pytest
import torch.distributed as dist
from figures import layers_of_ranks
from grids import some
from nvidia import go_on, needs_training, run, since
from supported import supports

from megatron_zbpp.guests import auto_plan
from megatron_zbpp.guests.auto_plan import AutoPlan, fit_layers_to_run
from megatron_zbpp.guests.background_search import BackgroundSearch

pytestmark = needs_training
BASE = '--pipeline-model-parallel-size 2 --global-batch-size 6 --clip-grad 1e9'.split()
UNTIED = '--global-batch-size 4 --clip-grad 1e9 --untie-embeddings-and-output-weights'.split()
CHUNKS = '--pipeline-schedule auto --num-virtual-stages-per-pipeline-rank'.split()
PROFILE = ['--pipeline-schedule-profile-iters']


@contextmanager
def told(training, switching=False, seconds=2.0):
    """What auto says, waiting for the planner: a test is shorter than a plan takes."""
    said, poll, simulate = [], AutoPlan._poll, auto_plan.simulate

    def wait(self, schedule):
        self._planner._process.wait()
        self.say = said.append
        return poll(self, schedule)

    def halved(schedule, costs):
        timeline = simulate(schedule, costs)
        if schedule.name != 'planned':
            return timeline
        return SimpleNamespace(value=lambda objective: timeline.value(objective) / 2)

    taken = mock.patch.object(auto_plan, 'simulate', halved if switching else simulate)
    hurried = mock.patch.object(auto_plan, 'AutoPlan', partial(AutoPlan, seconds=seconds))
    with mock.patch.object(AutoPlan, '_poll', wait), taken, hurried:
        yield said


@contextmanager
def searching(home):
    """What auto says, waiting for both searches."""
    ended = BackgroundSearch.ended

    def wait(self):
        self._process.wait()
        return ended(self)

    with (
        told(None, seconds=1.0) as said,
        mock.patch.object(BackgroundSearch, 'ended', wait),
        mock.patch.dict(os.environ, XDG_CACHE_HOME=str(home)),
    ):
        yield said


@contextmanager
def proposing(training, home):
    def slow(layout, schedule, costs, *more):
        times = (*[0.001] * (costs.num_stages - 1), 0.004)
        costs = replace(costs.with_times(F=times, B=times, W=times), comm=0.0)
        return fit_layers_to_run(layout, schedule, costs, *more)

    with searching(home) as said, mock.patch.object(auto_plan, 'fit_layers_to_run', slow):
        yield said


@supports("NVIDIA's loop: another partition is proposed, and the next start takes it", 'auto')
@some('chunks', [1], 2)
def test_another_partition(ranks, tmp_path, chunks):
    """From a checkpoint of the first, to the bit of stock; whether Megatron divided the layers."""
    flags = [*UNTIED, '--pipeline-model-parallel-size', 2, '--train-iters', 12, '--num-layers', 8]
    stock = run(ranks(2), *flags, '--save', tmp_path, '--save-interval', 1)
    auto = [*CHUNKS, chunks, *PROFILE, 1, '--load', tmp_path, '--ckpt-step', 1]
    auto += ['--save', tmp_path / 'ours', '--save-interval', 7]
    ours = run(ranks(2), *flags, *auto, event=partial(proposing, home=tmp_path))
    assert ours.losses == since(1, stock.losses) and ours.reported[1] == []
    *_, proposal = ours.reported[0]
    assert 'auto: the partition E' in proposal and '% faster' in proposal
    plan = proposal.rpartition(' ')[2]
    loading = ['--load', tmp_path / 'ours', '--ckpt-step', 7, '--pipeline-schedule-file', plan]
    resumed = run(ranks(2), *flags, *loading)
    assert resumed.losses == since(7, stock.losses)
    assert resumed.parameters == stock.parameters


def slow_layers(rank, slow):
    """Call `slow()` before each layer's forward on one rank."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    def late(*_, **__):
        if dist.get_rank() == rank:
            slow()

    return events.before((TransformerLayer, 'forward', late))


def keep_busy():
    until = time.perf_counter() + 0.04
    while time.perf_counter() < until:
        pass


@contextmanager
def slowed(training, home):
    """What auto says where each layer of rank 2 keeps its processor busy for longer."""
    with searching(home) as said, slow_layers(2, keep_busy):
        yield said


@pytest.mark.full
def test_a_slow_rank_gets_fewer_layers(ranks, tmp_path):
    """What ranks take for layers of the same kind tells which is slow; its plan spares that one."""
    flags = [*UNTIED, '--pipeline-model-parallel-size', 4, '--train-iters', 16, '--num-layers', 12]
    flags += [*CHUNKS, 1, *PROFILE, 3]
    found = run(ranks(4), *flags, event=partial(slowed, home=tmp_path))
    *_, said = found.reported[0]
    assert 'rank 2 takes' in said and 'times as long for its layers' in said
    held = layers_of_ranks(said.rpartition(' ')[2])
    assert sum(held) == 12 and held[2] < 3, held  # others are quick enough to have none


@contextmanager
def one_slow_replica(training):
    said = []
    heard = mock.patch.object(
        auto_plan, 'AutoPlan', partial(AutoPlan, seconds=1.0, say=said.append)
    )
    with heard, slow_layers(4, partial(time.sleep, 0.1)):
        yield said


@pytest.mark.full
def test_a_slow_replica_is_named(ranks):
    """Of three of two stages each: rank 4 has the last stage of the second."""
    flags = [*BASE, '--train-iters', 8, *CHUNKS, 1, *PROFILE, 3]
    found = run(ranks(6), *flags, event=one_slow_replica)
    slow = [said for said in found.reported[0] if 'other replicas' in said]
    assert any(said.startswith('auto: rank 4 takes ') for said in slow), found.reported[0]


@supports("NVIDIA's loop: measures, plans and switches", 'auto')
@pytest.mark.parametrize('chunks', [['--pipeline-schedule', 'auto'], [*CHUNKS, 1]], ids=['2', '1'])
def test_auto(ranks, tmp_path, chunks):
    """With two chunks a rank it switches for sure, with one if that is better."""
    two = '--num-virtual-stages-per-pipeline-rank' not in chunks
    auto = [*chunks, *PROFILE, 3, '--pipeline-trace-dir', tmp_path / 'trace']
    event = partial(told, switching=two)
    ours, _ = go_on(ranks(2), tmp_path, [*BASE, '--train-iters', 14], auto, event=event)
    first, *rest = (said for said in ours.reported[0] if 'partition' not in said)
    if two or 'switches' in first:
        (measured,) = rest
        assert 'switches' in first and 'ms with the planned schedule' in measured
    else:
        assert 'nothing better' in first and not rest
    page = (tmp_path / 'trace' / 'pipeline.html').read_text()
    assert '"name":"planned"' in page and '"name":"measured"' in page
    assert ('"name":"measured before, zb-' in page) == ('switches' in first)
    assert (tmp_path / 'trace' / 'pipeline.perfetto.json').exists()
