"""What forwards have saved on the partner meanwhile (BPipe): small stages, to the bit."""

import gc
import time
from unittest import mock

import torch
import torch.distributed as dist
from grids import grid
from programs import pairs
from stages import ROWS, WIDTH, LinearStage, reference, uneven
from test_nccl import MODES

from devtools import nccl
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.program import Receive, Send
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.evict.place import bound, with_eviction
from megatron_zbpp.techniques.recompute.place import recomputed

CPU = torch.device('cpu')


class Iterations:
    """Of one schedule on this rank, on groups like `group`."""

    def __init__(self, schedule, group, varying=False, stage_class=LinearStage, **named):
        self.schedule, self.varying, self.named = schedule, varying, named
        self.stage_class = stage_class
        self.programs, self.rank = lower(schedule), dist.get_rank()
        self.channels = Channels(group, pairs(self.programs), CPU, shapes=varying)
        self.activations = ActivationStore(CPU, small=1)
        self.activations.join(
            Channels(group, pairs(self.programs, saved=True), CPU, shapes=True, saved=True)
        )

    def executor(self, program):
        store, count = WeightGradStore(), self.schedule.num_stages
        rows = [uneven] if self.varying else []
        stages = {
            s: self.stage_class(store, s, count, *rows)
            for s in self.schedule.placement.stages(self.rank)
        }
        self.activations.keep(p for stage in stages.values() for p in stage.parameters())
        message = Message(None if self.varying else (ROWS, WIDTH), torch.float32, CPU)
        executor = Executor(
            program,
            stages,
            self.channels,
            message,
            store,
            HostClock(),
            activations=self.activations,
            **self.named,
        )
        return executor, stages

    def ahead(self):
        """Its program with the forwards first that may run ahead, and how many these are."""
        counts = passes_ahead(self.schedule)
        ahead = passes_run_ahead(self.schedule, counts, self.schedule.num_ranks)
        first, rest = split(self.programs[self.rank], ahead)
        return first + rest, len(first)

    def drop(self):
        """Runs forwards ahead for nothing."""
        program, count = self.ahead()
        executor, _ = self.executor(program)
        executor.run_ahead(count)
        executor.drop()
        assert not self.activations.away and not self.activations.kept

    def train(self, ahead=False):
        """Losses and gradients by stage, bytes that left, and what was held after each pass."""
        program, count = self.ahead() if ahead else (self.programs[self.rank], 0)
        executor, stages = self.executor(program)
        executor.run_ahead(count)
        record = executor.run()
        assert not self.activations.away and not self.activations.kept
        assert not self.activations._bundles and executor.moves.waits is None
        made = {s: (m.losses, [p.grad for p in m.parameters()]) for s, m in stages.items()}
        moved = {s: found.moved for s, found in self.activations.bytes.items()}
        return made, moved, record.live


def on_gloo(schedule, varying):
    iterations = Iterations(schedule, dist.group.WORLD, varying)
    results = [iterations.train()]
    iterations.drop()
    return [*results, iterations.train(ahead=True)]


def drop_and_go(schedule, varying):
    """Runs ahead for nothing, the later ranks slowly, and ends what messages went by."""
    iterations = Iterations(schedule, dist.group.WORLD, varying)
    program, count = iterations.ahead()
    executor, _ = iterations.executor(program)
    executor.run_ahead(count)
    time.sleep(0.2 * iterations.rank)
    executor.drop()
    del executor, iterations
    gc.collect()


def on_nccl(schedule, varying, mode):
    with nccl.Device(**MODES[mode]) as device:
        group = dist.new_group(list(range(dist.get_world_size())), backend=nccl.NAME)
        iterations = Iterations(schedule, group, varying, named=device.passing)
        results = [iterations.train()]
        iterations.drop()
        return [*results, iterations.train(ahead=True)]


def verify(schedule, results, varying):
    p, m = schedule.num_ranks, schedule.num_microbatches
    losses, gradients = reference(p, m, True, *([uneven] if varying else []))
    planned = peak(schedule, Costs.uniform(schedule.placement))
    for rank, iterations in enumerate(results):
        for made, moved, held in iterations:
            assert max(held) <= planned[rank] <= bound(p)
            assert bool(moved.get(rank)) == any(q.kind == 'E' for q in schedule.passes[rank])
            for stage, (own, grads) in made.items():
                assert stage < p - 1 or own == losses
                assert all(map(torch.equal, grads, gradients[stage]))


@grid(p=(2, 4, 5, 8), m=(8, 9, 16), varying=(False, True), when=lambda p, m, varying: p <= m)
def test_to_the_bit(ranks, p, m, varying):
    """No rank holds more than was planned; forwards run ahead, and are dropped."""
    schedule = build('bpipe', p, m)
    verify(schedule, ranks(p).run(on_gloo, schedule, varying), varying)


@grid(name=('bpipe', 'zb-v', 'zb-2p', '1f1b'), p=(4, 2), varying=(False, True))
def test_a_training_ends_behind_its_last_drop(ranks, name, p, varying):
    """A send that is given up never leaves, and whoever receives it waits for ever."""
    ranks(p).run(drop_and_go, build(name, p, 8), varying)


@grid(mode=tuple(MODES), p=(4, 6), varying=(False, True))
def test_as_nccl_orders_and_blocks(ranks, mode, p, varying):
    schedule = build('bpipe', p, 8)
    verify(schedule, ranks(p).run(on_nccl, schedule, varying, mode, timeout=200), varying)


def test_inputs_of_what_runs_again(ranks):
    """The second of six ranks evicts, too: what a stage has received, and nothing else."""
    schedule = recomputed(build('bpipe', 6, 8), 'all')
    results = ranks(6).run(on_gloo, schedule, False)
    losses, gradients = reference(6, 8)
    for rank, iterations in enumerate(results):
        for made, moved, _ in iterations:
            assert moved == ({0: 0} if rank == 0 else {1: ROWS * WIDTH * 4} if rank == 1 else {})
            for stage, (own, grads) in made.items():
                assert stage < 5 or own == losses
                assert all(map(torch.equal, grads, gradients[stage]))


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
    if mode is None:
        results = ranks(p).run(on_gloo, schedule, False)
    else:
        results = ranks(p).run(on_nccl, schedule, False, mode, timeout=200)
    recomputing = {p.stage for _, p in schedule if p.kind == 'R'}
    # the first stage has no input that could go
    something = any(p.kind == 'E' and (p.stage or 0 not in recomputing) for _, p in schedule)
    losses, gradients = reference(schedule.num_stages, 8)
    for rank, iterations in enumerate(results):
        for made, moved, _ in iterations:
            assert any(moved.values()) == (rank == 0 and something)
            for stage, (own, grads) in made.items():
                assert stage < schedule.num_stages - 1 or own == losses
                assert all(map(torch.equal, grads, gradients[stage]))


def test_the_peak_is_reached(ranks):
    """Both of a pair: the one that sends, and the one that keeps."""
    schedule = build('bpipe', 4, 8)
    (first, *_), *_, (last, *_) = ranks(4).run(on_gloo, schedule, False)
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
        iterations = Iterations(schedule, group, stage_class=DeepStage)
        count = mock.patch.object(nccl.Communicator, 'issue', autospec=True, side_effect=_issue)
        sizes = mock.patch.object(Channels, 'tell_sizes', autospec=True, side_effect=_tell_sizes)
        with count as issued, sizes as told:
            iterations.train()
        storages = [len(call.args[1]) for call in told.call_args_list]
        program = iterations.programs[iterations.rank]
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
