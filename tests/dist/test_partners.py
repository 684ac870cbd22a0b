"""What forwards have saved on the partner meanwhile (BPipe): small stages, to the bit."""

import gc
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid
from stages import ROWS, WIDTH, LinearStage, Pipeline, even, require_same, uneven
from test_nccl import MODES

from devtools import nccl
from megatron_zbpp import Costs
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict import bound, with_eviction
from megatron_zbpp.techniques.recompute import recomputed


def trained(pipeline, ahead=False):
    """Losses and gradients by stage, bytes that left, and what was held after each pass."""
    record = pipeline.run(ahead)
    return pipeline.made, pipeline.moved, record.live


def train_twice(pipeline):
    """An iteration, and one whose forwards ran ahead, with some between that did for nothing."""
    first = trained(pipeline)
    pipeline.drop()
    return [first, trained(pipeline, ahead=True)]


def on_gloo(schedule, rows=even):
    return train_twice(Pipeline(schedule, rows=rows))


def on_nccl(schedule, mode, rows=even):
    with nccl.Device(**MODES[mode]) as device:
        group = dist.new_group(list(range(dist.get_world_size())), backend=nccl.NAME)
        return train_twice(Pipeline(schedule, group, rows=rows, named=device.passing))


def require_all_same(schedule, results, rows=even):
    require_same(schedule, (made for iterations in results for made, *_ in iterations), rows)


def verify(schedule, results, rows):
    require_all_same(schedule, results, rows)
    planned = peak(schedule, Costs.uniform(schedule.placement))
    for rank, iterations in enumerate(results):
        for _, moved, held in iterations:
            assert max(held) <= planned[rank] <= bound(schedule.num_ranks)
            assert bool(moved.get(rank)) == any(q.kind == 'E' for q in schedule.passes[rank])


@grid(p=(2, 4, 5, 8), m=(8, 9, 16), rows=(even, uneven), when=lambda p, m, rows: p <= m)
def test_to_the_bit(ranks, p, m, rows):
    """No rank holds more than was planned; forwards run ahead, and are dropped."""
    schedule = build('bpipe', p, m)
    verify(schedule, ranks(p).run(on_gloo, schedule, rows), rows)


@pytest.mark.on_ranks('p')
@grid(name=('bpipe', 'zb-v', 'zb-2p', '1f1b'), p=(4, 2), rows=(even, uneven))
def test_a_training_ends_behind_its_last_drop(name, p, rows):
    """Ranks run ahead for nothing, the later ones slowly, and end what messages went by: a send
    that is given up never leaves, and whoever receives it waits for ever."""
    pipeline = Pipeline(build(name, p, 8), rows=rows)
    executor = pipeline.begin_ahead()
    time.sleep(0.2 * pipeline.rank)
    executor.drop()
    del executor, pipeline
    gc.collect()


@grid(mode=tuple(MODES), p=(4, 6), rows=(even, uneven))
def test_as_nccl_orders_and_blocks(ranks, mode, p, rows):
    schedule = build('bpipe', p, 8)
    verify(schedule, ranks(p).run(on_nccl, schedule, mode, rows), rows)


def test_inputs_of_what_runs_again(ranks):
    """The second of six ranks evicts, too: what a stage has received, and nothing else."""
    schedule = recomputed(build('bpipe', 6, 8), 'all')
    results = ranks(6).run(on_gloo, schedule)
    require_all_same(schedule, results)
    for rank, iterations in enumerate(results):
        expected = {0: 0} if rank == 0 else {1: ROWS * WIDTH * 4} if rank == 1 else {}
        assert all(moved == expected for _, moved, _ in iterations)


def of_any_order(name, p, m):
    """The first rank has room for three quarters of what it would hold."""
    plain = build(name, p, m)
    costs = Costs.uniform(plain.placement)
    limits = [0.75 * peak(plain, costs)[0], *(99.0,) * (p - 1)]
    schedule = with_eviction(plain, range(plain.num_stages), costs, limits)
    assert any(p.kind == 'E' for _, p in schedule)
    return schedule


@grid(
    name=('zb-v', 'interleaved', 'zb-h1', 'gpipe'),
    p=(4, 2, 2, 2),
    again=(False, True),
    mode=(None, 'both'),
)
def test_evictions_of_any_order(ranks, name, p, again, mode):
    """Split passes, several chunks; of what runs again, the input: to the bit."""
    schedule = of_any_order(name, p, 8)
    schedule = recomputed(schedule, 'half') if again else schedule
    results = ranks(p).run(on_nccl if mode else on_gloo, schedule, *([mode] if mode else []))
    require_all_same(schedule, results)
    recomputing = {p.stage for _, p in schedule if p.kind == 'R'}
    # the first stage has no input that could go
    something = any(p.kind == 'E' and (p.stage or 0 not in recomputing) for _, p in schedule)
    for rank, iterations in enumerate(results):
        for _, moved, _ in iterations:
            assert any(moved.values()) == (rank == 0 and something)


def test_the_peak_is_reached(ranks):
    """Both of a pair: the one that sends, and the one that keeps."""
    schedule = build('bpipe', 4, 8)
    (first, *_), *_, (last, *_) = ranks(4).run(on_gloo, schedule)
    assert max(first[2]) == max(last[2]) == bound(4) < 4


class DeepStage(LinearStage):
    """Saves more than a storage of its own."""

    def forward(self, p, received):
        return torch.sin(torch.cos(super().forward(p, received)))


def launches(schedule):
    """Operations that a rank launches in an iteration, and storages that it sends to its partner.

    Those that the program has: of messages, and of what forwards have saved.
    """
    with nccl.Device():
        group = dist.new_group(list(range(dist.get_world_size())), backend=nccl.NAME)
        pipeline = Pipeline(schedule, group, stage_class=DeepStage)
        count = mock.patch.object(nccl.Communicator, 'issue', autospec=True, side_effect=_issue)
        sizes = mock.patch.object(Channels, 'tell_sizes', autospec=True, side_effect=_tell_sizes)
        with count as issued, sizes as told:
            pipeline.run()
        storages = [len(call.args[1]) for call in told.call_args_list]
        program = pipeline.programs[pipeline.rank]
        planned = [i for i in program if isinstance(i, Send | Receive)]
        dist.barrier()
    return issued.call_count, len(planned), storages


_issue, _tell_sizes = nccl.Communicator.issue, Channels.tell_sizes


def test_what_a_pass_has_saved_travels_by_one_call(ranks):
    """However many storages these are: each call is a kernel and some time of the host."""
    schedule = build('bpipe', 4, 6)
    found = ranks(4).run(launches, schedule)
    assert any(storages and min(storages) > 1 for *_, storages in found)
    for launched, planned, _ in found:
        assert launched == planned
