"""What autograd saved is on the host or on a partner meanwhile: plain stages, to the bit."""

import functools
import gc
import json
import os
import random
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from grids import grid, some
from stages import CPU, ROWS, WIDTH, LinearStage, Pipeline, even, require_same, uneven
from test_nccl import MODES, pipeline_on

from benchmarks.copies import cli
from benchmarks.copies.measure import Case, measured
from benchmarks.copies.stage import Sizes
from devtools import nccl
from megatron_zbpp import Costs
from megatron_zbpp.analysis.memory import live, peak
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.runtime.activations import copies
from megatron_zbpp.runtime.activations.copies import Copies, Slabs
from megatron_zbpp.runtime.activations.store import ActivationStore, Bytes, SavedActivations
from megatron_zbpp.runtime.channels import Channels
from megatron_zbpp.runtime.stage import key_of
from megatron_zbpp.schedules import FAMILIES, build
from megatron_zbpp.techniques.evict import bound, with_eviction
from megatron_zbpp.techniques.offload import offloaded
from megatron_zbpp.techniques.recompute import recomputed


def executed(schedule, fails=False):
    """On each rank: losses and gradients by stage, bytes by stage, what was said, what was held."""
    said, pipeline = [], Pipeline(schedule)
    pipeline.activations._say = said.append
    full = mock.patch.object(copies, 'room', lambda: copies.Room(1, Path('a limit')))
    with full if fails else nullcontext():
        record = pipeline.run()
    return pipeline.made, pipeline.activations.bytes, said, record.live


@grid(
    name=tuple(family.name for family in FAMILIES if family.name != 'bpipe'),
    p=(2, 2, 4),
    fails=(False, False, True),
)
def test_to_the_bit(ranks, name, p, fails):
    """Every schedule, also where the host has no room: then all stays, and that is said once."""
    schedule = build(name, p, 8)
    if not any(each.kind == 'O' for _, each in schedule):
        schedule = offloaded(schedule, 'all', ratio=0.1)
    again = {key_of(each) for _, each in schedule if each.kind == 'R'}
    leaving = [each for _, each in schedule if each.kind == 'O']
    assert leaving
    # of a forward that runs again its input leaves, which the first stage has none of
    moves = any(each.stage > 0 or key_of(each) not in again for each in leaving)
    results = ranks(p).run(executed, schedule, fails)
    require_same(schedule, (made for made, *_ in results))
    assert any(each.moved for _, found, _, _ in results for each in found.values()) == (
        moves and not fails
    )
    if not fails:
        require_planned(schedule, results)
    for _, found, said, _ in results:
        assert len(said) == (fails and bool(found))
        assert all('of 9.31e-10 GiB (a limit) left: give the job more memory' in s for s in said)


def require_planned(schedule, results):
    """Require what is held after each pass to be what was planned, in activations of a stage."""
    ones = (1.0,) * schedule.num_stages
    planned = live(schedule, Costs.of(ones, ones, ones))
    assert [tuple(held) for *_, held in results] == list(planned)


def saved(tensor, weight, kept):
    """Three products: of views of one storage, of what somebody holds, of a parameter."""
    first, second = tensor.exp().chunk(2)
    return (first * second * kept * weight).sum()


def bundle_of(small):
    return SavedActivations(Copies(CPU), frozenset(), small=small)


def packing(bundle):
    return torch.autograd.graph.saved_tensors_hooks(bundle.pack, bundle.unpack)


def gradients_of(bundle=None):
    tensor = torch.linspace(0, 1, 64).requires_grad_()
    weight = torch.nn.Parameter(torch.linspace(1, 2, 32))
    kept = torch.linspace(2, 3, 32)
    if bundle is None:
        saved(tensor, weight, kept).backward()
    else:
        bundle._staying = {weight.untyped_storage()._cdata}
        with packing(bundle):
            loss = saved(tensor, weight, kept)
        bundle.begin_out()
        bundle.leave()
        assert bundle.away
        bundle.begin_back()
        loss.backward()
        bundle.drop()
    return tensor.grad, weight.grad


def test_bytes_are_told_by_the_reason():
    bundle = bundle_of(16)
    assert all(map(torch.equal, gradients_of(bundle), gradients_of()))
    assert bundle.bytes.moved >= 64 * 4  # two halves of one storage once, and products
    assert bundle.bytes.stayed['parameters'] == 32 * 4
    assert bundle.bytes.stayed['held by others'] >= 32 * 4


class Quantized(torch.Tensor):
    """As Transformer Engine's (2.20): whenever it is asked, its storage is another one."""

    def untyped_storage(self):
        asked.append(super().untyped_storage())
        return torch.UntypedStorage(0)


asked = []


def test_quantized_weights_are_not_known_by_a_place():
    """That of the storage they tell may be an activation's, once that is gone."""
    store = ActivationStore(CPU)
    quantized = torch.nn.Parameter(torch.ones(4).as_subclass(Quantized))
    plain = torch.nn.Parameter(torch.ones(4))
    quantized.main_grad = torch.zeros(4)
    asked.clear()
    store.keep([quantized, plain])
    assert not asked and list(store._parameters.values()) == [plain]
    main = quantized.main_grad.untyped_storage()._cdata
    assert store._staying == {plain.untyped_storage()._cdata, main}


def test_small_tensors_stay():
    bundle = bundle_of(16)
    tensor = torch.ones(8, requires_grad=True)
    with packing(bundle):
        loss = tensor.exp().sum()
    bundle.begin_out()
    assert bundle.bytes.moved == 0 and bundle.bytes.stayed == {'small tensors': 32}
    bundle.leave()
    loss.backward()
    assert tensor.grad is not None and not bundle.away


def test_a_small_part_takes_along_what_it_is_of():
    """Memory of which only a row is saved would stay as a whole."""
    bundle = bundle_of(16)
    weight = torch.ones(4, requires_grad=True)
    with packing(bundle):
        loss = (torch.ones(256)[:4] * weight).sum()
    bundle.begin_out()
    bundle.leave()
    assert bundle.away and bundle.bytes.moved == 256 * 4
    bundle.begin_back()
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(4))


def test_memory_is_freed_when_it_leaves():
    """Who holds nothing of it sees the storage go; the input keeps its tensor, without memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    bundle = bundle_of(1)
    received = torch.ones(64).requires_grad_()
    bundle.take(received)
    with packing(bundle):
        made = received.exp()
        gone = StorageWeakRef(made.untyped_storage())
        loss = (made * received).sum()
    del made
    bundle.begin_out()
    bundle.leave()
    assert gone.expired() and received.untyped_storage().nbytes() == 0
    bundle.begin_back()
    loss.backward()
    expected = torch.ones(64).requires_grad_()
    (expected.exp() * expected).sum().backward()
    assert torch.equal(received.grad, expected.grad)
    assert torch.equal(received, torch.ones(64))


def test_slabs_of_passes_that_differ():
    """As many as are in use at once, however often sizes change; those too small are given back."""
    new = functools.partial(torch.empty, dtype=torch.uint8)
    pool, drawn = Slabs(), random.Random(0)
    for _ in range(200):
        sizes = [drawn.randint(600, 1000) for _ in range(3)] + [drawn.randint(60, 100)]
        taken = [pool.take(size, new) for size in sizes]
        assert all(slab.numel() >= size for slab, size in zip(taken, sizes, strict=True))
        assert len({slab.data_ptr() for slab in taken}) == 4
        for slab in taken:
            pool.give(slab)
        assert len(pool._free) == 4
        pool.release()
        assert not pool._retired
    assert sum(slab.numel() for slab in pool._free) <= 1.125 * (3 * 1000 + 100)


def test_the_link_is_timed():
    """Once something has gone: with the largest slab, which is used again."""
    engine = Copies(CPU)
    assert engine.seconds_per_byte() is None
    storage = torch.ones(1000).untyped_storage()
    slab, _ = engine.out([storage])
    engine.back(slab, [storage])
    rate = engine.seconds_per_byte()
    assert rate is not None and 0 < rate < 1
    assert engine.out([storage])[0] is slab


def test_what_leaves_is_told_once():
    said = []
    store = ActivationStore(CPU, said.append)
    store.tell(everything=True)
    assert not said  # nothing has left yet
    store._latest[0] = {0: Bytes(3 * 2**19, {'parameters': 2**19}), 1: Bytes(3 * 2**19)}
    store._latest[1] = {0: Bytes(0, {'held by others': 2**20})}
    store.tell(everything=False)
    store.tell(everything=True)
    assert said == [
        'offload of stage 1: 0.00 MiB of a microbatch leave; stay: held by others 1.00: so the '
        'device holds more than planned'
    ]
    assert str(store.bytes[0]) == '3.00 MiB of a microbatch leave; stay: parameters 0.50'


# ---- On a partner meanwhile (`bpipe`).


def trained(pipeline, ahead=False):
    """Losses and gradients by stage, bytes that left, and what was held after each pass."""
    record = pipeline.run(ahead)
    return pipeline.made, pipeline.moved, record.live


def twice(schedule, rows=even, mode=None):
    """An iteration, and one whose forwards ran ahead, with some between that did for nothing."""
    with pipeline_on(mode) as options:
        pipeline = Pipeline(schedule, rows=rows, **options)
        first = trained(pipeline)
        pipeline.drop()
        return [first, trained(pipeline, ahead=True)]


def require_all_same(schedule, results, rows=even):
    require_same(schedule, (made for iterations in results for made, *_ in iterations), rows)


def verify(schedule, results, rows):
    require_all_same(schedule, results, rows)
    planned = peak(schedule, Costs.uniform(schedule.placement))
    for rank, iterations in enumerate(results):
        for _, moved, held in iterations:
            assert max(held) <= planned[rank] <= bound(schedule.num_ranks)
            assert bool(moved.get(rank)) == any(q.kind == 'E' for q in schedule.passes[rank])
    if (schedule.num_ranks, rows) == (4, even):  # reached by both of a pair: who sends, who keeps
        assert {max(held) for _, _, held in results[0] + results[-1]} == {bound(4)}


@grid(
    when=lambda p, m, **_: p <= m,
    p=(4, 2, 5, 8, 6),
    m=(8, 9, 16),
    rows=(even, uneven),
    mode=(None, *MODES),
)
def test_partners_to_the_bit(ranks, p, m, rows, mode):
    """No rank holds more than was planned; forwards run ahead, and are dropped."""
    schedule = build('bpipe', p, m)
    verify(schedule, ranks(p).run(twice, schedule, rows, mode), rows)


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
    schedule = of_any_order(name, p, 8)
    schedule = recomputed(schedule, 'half') if again else schedule
    results = ranks(p).run(twice, schedule, even, mode)
    require_all_same(schedule, results)
    recomputing = {p.stage for _, p in schedule if p.kind == 'R'}
    # the first stage has no input that could go
    something = any(p.kind == 'E' and (p.stage or 0 not in recomputing) for _, p in schedule)
    for rank, iterations in enumerate(results):
        for _, moved, _ in iterations:
            assert any(moved.values()) == (rank == 0 and something)
            # of what runs again its input leaves, and nothing else
            inputs = {moved.get(stage, 0) for stage in recomputing}
            assert inputs <= {0, ROWS * WIDTH * 4}


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


# ---- Time and memory of what moves, as simulated: a copy engine sleeps beside the passes.


MIB = 2**20


# by schedule: stages of which the process that holds most has all; None: as copies come and go
HELD = {'bpipe': 3, 'po+offload': None, '1f1b+recompute': 1, 'po': None}


@some('name', ['bpipe', 'po+offload'], *HELD)
def test_the_resident_set_is_what_was_planned(name):
    """Of each process, within a tenth; without `bpipe` the first of four would hold four."""
    p, m, seconds = (2, 4, 2e-3) if HELD[name] is None else (4, 6, 1e-3)
    found = measured(Case(name, 1.0, p, m, Sizes(seconds, 34 * MIB), 2))
    assert found.held == pytest.approx(found.planned, rel=0.1)
    assert HELD[name] is None or max(found.planned) == HELD[name] * 34 * MIB


def test_the_command(tmp_path, monkeypatch):
    """scripts/benchmark_copies.py at its smallest."""
    monkeypatch.setattr(cli, '_TIMED', [('1f1b+offload', 2.0)])
    monkeypatch.setattr(cli, '_HELD', [('1f1b', 2)])
    file = tmp_path / 'found.json'
    assert cli.main(['--ms', '5', '--mib', '34', '--rounds', '1', '--json', str(file)]) == 0
    timed, held = json.loads(file.read_text())
    # how much longer, on a busy machine, nobody knows: the test of whole sizes asks
    assert timed['seconds'] > 0.99 * timed['simulated'] and timed['k'] == 2
    assert held['held'] == pytest.approx(held['planned'], rel=0.1)


@pytest.mark.full
@pytest.mark.parametrize('k', [0.5, 1.0, 2.0])
@pytest.mark.parametrize('name', ['po+offload', '1f1b+offload', 'interleaved+offload'])
def test_time_is_as_simulated(name, k):
    """Within 3 %, where the copies hide behind the passes and where they do not."""
    case = Case(name, k, sizes=Sizes(0.1, MIB), rounds=4, realtime=os.geteuid() == 0)
    found = measured(case)
    assert found.seconds == pytest.approx(found.simulated, rel=0.03)
