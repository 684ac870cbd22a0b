"""Small stages without Megatron, a rank that runs them, and a plain reference for them."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
from programs import pairs

from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.run_ahead import passes_ahead, passes_run_ahead, split
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime.activations.store import ActivationStore
from megatron_zbpp.runtime.channels import Channels, Message
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.runtime.executor import Executor
from megatron_zbpp.runtime.measure import Iteration
from megatron_zbpp.runtime.weight_grads import WeightGradStore

WIDTH, ROWS = 6, 3
CPU = torch.device('cpu')


def even(microbatch):
    return ROWS


def uneven(microbatch):
    return ROWS + 7 * microbatch % 4


def message_of(rows=even, on=CPU):
    return Message((ROWS, WIDTH) if rows is even else None, torch.float32, on)


class DeferredLinear(torch.autograd.Function):
    """y = x w, with the gradient of w left to the store if it defers."""

    @staticmethod
    def forward(ctx, store, weight, x, alias):
        ctx.store, ctx.weight = store, weight
        ctx.save_for_backward(x, alias)
        return x @ alias

    @staticmethod
    def backward(ctx, gradient):
        x, alias = ctx.saved_tensors
        ctx.store.defer([ctx.weight], lambda: [x.t() @ gradient])
        return None, None, gradient @ alias.t(), None


class LinearStage(torch.nn.Module):
    """tanh(x w) with a bias whose gradient comes with B; the last stage returns a loss."""

    def __init__(self, store, stage, num_stages, rows=even):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.store, self.first, self.last = store, stage == 0, stage == num_stages - 1
        self.rows = rows  # of each microbatch
        self.complete = None  # the gradients, when they were said to be complete
        self._losses = []
        self.ran = []  # forwards of which nothing was saved, and those that ran again

    def forward(self, p, received):
        x = received
        if self.first:
            x = torch.full(
                (self.rows(p.microbatch), WIDTH), 0.1 * (p.microbatch + 1), device=self.bias.device
            )
        x = x + self.bias
        if self.store is not None and self.store.deferring:
            y = DeferredLinear.apply(self.store, self.weight, x, self.weight.detach())
        else:
            y = x @ self.weight
        if not self.last:
            return torch.tanh(y)
        loss = y.square().sum()
        self._losses.append(loss.detach())
        return loss

    @property
    def losses(self):
        """Of the microbatches so far; read once they have run, so that no pass waits for them."""
        return [loss.item() for loss in self._losses]

    def forward_without_graph(self, p, received):
        self.ran = [*self.ran, ('F', p.microbatch)]
        with torch.no_grad():
            return self.forward(p, received)

    def recompute(self, p, received):
        self.ran = [*self.ran, ('R', p.microbatch)]
        output = self.forward(p, received)
        if self.last:
            self._losses.pop()
        return output

    def backward(self, p, received, output, gradient):
        torch.autograd.backward(output, gradient)
        return None if received is None else received.grad

    def release(self, output):
        pass

    @contextmanager
    def grad_sync(self, last):
        yield
        if last:
            self.complete = tuple(p.grad.clone() for p in self.parameters() if p.grad is not None)


class Pipeline:
    """The part of this rank in a pipeline of small stages, on the ranks of `group` (the world).

    Microbatches have so many `rows`; `stage_class` makes a stage of the store, its number, that of
    all, and the rows; programs are lowered and messages of the rows unless given; `kept`: there is
    a store of activations. Other options are the executor's.
    """

    def __init__(
        self,
        schedule,
        group=None,
        *,
        rows=even,
        stage_class=LinearStage,
        on=CPU,
        programs=None,
        separate=None,
        kept=True,
        message=None,
        **options,
    ):
        group = group or dist.group.WORLD
        self.schedule, self.rank, self.options = schedule, dist.get_rank(group), options
        self.rows, self.stage_class, self.on = rows, stage_class, on
        self.message = message or message_of(rows, on)
        self.programs = programs = programs or lower(schedule)
        varying = rows is not even
        self.channels = Channels(group, pairs(programs), on, separate=separate, shapes=varying)
        self.activations = ActivationStore(on, small=1) if kept else None
        partners = pairs(programs, saved=True)
        if partners:
            self.activations.join(Channels(group, partners, on, shapes=True, saved=True))

    def executor(self, program=None):
        self.store, count = WeightGradStore(), self.schedule.num_stages
        self.stages = {
            stage: self.stage_class(self.store, stage, count, self.rows).to(self.on)
            for stage in self.schedule.placement.stages(self.rank)
        }
        if self.activations is not None:
            self.activations.keep(p for each in self.stages.values() for p in each.parameters())
        options = {'clock': HostClock(), 'activations': self.activations} | self.options
        program = self.programs[self.rank] if program is None else program
        return Executor(program, self.stages, self.channels, self.message, self.store, **options)

    def begin_ahead(self):
        """Return the executor of an iteration whose forwards that may have run ahead."""
        counts = passes_ahead(self.schedule)
        ahead = passes_run_ahead(self.schedule, counts, self.schedule.num_ranks)
        first, rest = split(self.programs[self.rank], ahead)
        executor = self.executor(first + rest)
        executor.run_ahead(len(first))
        return executor

    def run(self, ahead=False):
        executor = self.begin_ahead() if ahead else self.executor()
        record = executor.run()
        assert not self.store.pending and not self.store.deferring
        assert executor.transfers is None or executor.transfers.waits is None
        self._require_nothing_left()
        return record

    def drop(self):
        """Run forwards ahead for nothing."""
        self.begin_ahead().drop()
        self._require_nothing_left()

    def _require_nothing_left(self):
        store = self.activations
        assert store is None or not (store.away or store.kept or store.bundles)

    @property
    def made(self):
        return {
            number: (stage.losses, [p.grad.cpu() for p in stage.parameters()])
            for number, stage in self.stages.items()
        }

    @property
    def moved(self):
        return {stage: found.moved for stage, found in self.activations.bytes.items()}


def require_same(schedule, results, rows=even, replicas=1):
    """Require losses and gradients, by rank and stage, to be those of one process to the bit."""
    last = schedule.num_stages - 1
    losses, gradients = reference(last + 1, schedule.num_microbatches, rows)
    for made in results:
        for stage, (own, grads) in made.items():
            assert own == (losses if stage == last else [])
            for gradient, expected in zip(grads, gradients[stage], strict=True):
                assert torch.equal(gradient, replicas * expected), stage


def reference(num_stages, num_microbatches, rows=even):
    stages = [LinearStage(None, stage, num_stages, rows) for stage in range(num_stages)]
    for microbatch in range(num_microbatches):
        value = None
        for index, stage in enumerate(stages):
            value = stage(Pass(F, index, microbatch), value)
        value.backward()
    gradients = [tuple(p.grad for p in stage.parameters()) for stage in stages]
    return stages[-1].losses, gradients


# ---- Stages that take time, on hosts whose clocks do not agree.


PASS = 0.002  # seconds, at least


class ShiftedClock(HostClock):
    """One of a host that was started at another time."""

    def __init__(self, ahead):
        self._ahead = ahead

    def mark(self):
        return super().mark() + self._ahead

    def now(self):
        return super().now() + self._ahead


class SlowStage(LinearStage):
    def forward(self, p, received):
        time.sleep(PASS)
        return super().forward(p, received)


class TimedPipeline(Pipeline):
    def __init__(self, schedule, clock):
        super().__init__(schedule, stage_class=SlowStage, kept=False, clock=clock)

    def run(self):
        return Iteration(self.schedule, dist.group.WORLD, super().run(), self.options['clock'])
