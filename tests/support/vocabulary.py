"""A pipeline whose output layer is on all ranks, without Megatron, and a plain reference for it."""

import torch
import torch.distributed as dist
from stages import CPU, ROWS, WIDTH, LinearStage, Pipeline, even, message_of

from megatron_zbpp.ir import F, Pass, Placement, Schedule, chain
from megatron_zbpp.runtime.collectives import Collectives
from megatron_zbpp.techniques.vocabulary.graph import (
    GRADIENT,
    HIDDEN,
    STATISTICS,
    S,
    T,
    split_vocabulary,
)

WORDS = 24


def split_1f1b(p: int, m: int) -> Schedule:
    """1F1B in which each backward comes one forward later, and S a lead before it."""
    orders = []
    for rank in range(p):
        lead, ahead = min(p - rank, m), min(p - rank + 1, m)
        order = [Pass(F, rank, i) for i in range(p - rank) if i < m]
        for i in range(max(lead, ahead - (p - rank))):
            order += [Pass(S, p + rank, i)] if i < lead else []
            order += [Pass(F, rank, p - rank + i)] if p - rank + i < ahead else []
        for i in range(m):
            order += [Pass('BW', rank, i), Pass(T, p + rank, i)]
            order += [Pass(S, p + rank, lead + i)] if lead + i < m else []
            order += [Pass(F, rank, ahead + i)] if ahead + i < m else []
        orders.append(order)
    return Schedule.of('split', Placement.loop(p), m, orders, split_vocabulary(chain(p), p))


def weights() -> torch.Tensor:
    return torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(5)) * 0.4


def targets(microbatch: int, on: torch.device = CPU) -> torch.Tensor:
    return (torch.arange(ROWS, device=on) * 7 + 5 * microbatch) % WORDS


class Hidden(LinearStage):
    def __init__(self, store, stage, num_stages=0, rows=even):
        super().__init__(store, stage, 0, rows)  # none is the last


class Shard:
    """The part of the output layer of one rank: Algorithm 2."""

    def __init__(self, rank: int, size: int, on: torch.device) -> None:
        self.rank, self.count, self.on = rank, WORDS // size, on
        self.weight = weights()[rank * self.count : (rank + 1) * self.count].to(on)
        self.gradient = torch.zeros_like(self.weight)
        self.losses: list[torch.Tensor] = []
        self._kept: dict[int, tuple] = {}

    def logits(self, p, inputs):
        """S: the logits, and this rank's part of the gradient of the hidden states."""
        ((hidden,),) = inputs.values()
        y = hidden @ self.weight.t()
        most = y.max(-1).values
        powers = (y - most[:, None]).exp()
        sums = powers.sum(-1)
        target = targets(p.microbatch, self.on) - self.rank * self.count
        hits = (target[:, None] == torch.arange(self.count, device=self.on)).to(y.dtype)
        soft = powers / sums[:, None]
        away, there = soft @ self.weight, hits @ self.weight
        self._kept[p.microbatch] = hidden, soft, hits

        def part(gathered):
            return self._share(gathered)[:, None] * away - there

        return {STATISTICS: torch.stack([most, sums, (y * hits).sum(-1)]), GRADIENT: part}

    def weight_gradient(self, p, inputs):
        ((gathered,),) = inputs.values()
        hidden, soft, hits = self._kept.pop(p.microbatch)
        self.gradient += (self._share(gathered)[:, None] * soft - hits).t() @ hidden
        most, sums, found = torch.stack(gathered).unbind(1)
        top = most.max(0).values
        total = (sums * (most - top).exp()).sum(0)
        self.losses.append((total.log() + top - found.sum(0)).sum())
        return {}

    def _share(self, gathered) -> torch.Tensor:
        """Return what this rank's softmax is of that over all words."""
        most, sums, _ = torch.stack(gathered).unbind(1)
        each = sums * (most - most.max(0).values).exp()
        return each[self.rank] / each.sum(0)


def executor(schedule: Schedule, group=None, of_collectives=None, on=CPU, **options):
    """Return the executor of this rank, with its stage and its shard; groups are of messages and
    of collectives."""
    rank = dist.get_rank()
    shard, hidden = Shard(rank, schedule.num_ranks, on), (message_of(on=on),)
    of_names = {HIDDEN: hidden, GRADIENT: hidden}
    options['collectives'] = Collectives(
        of_collectives or dist.new_group(), range(schedule.num_ranks), on, of_names
    )
    options['actions'] = {S: shard.logits, T: shard.weight_gradient}
    pipeline = Pipeline(schedule, group, on=on, stage_class=Hidden, kept=False, **options)
    return pipeline.executor(), pipeline.stages[rank], shard


def reference(num_stages: int, num_microbatches: int):
    """Losses, gradients of stages, and that of the whole output layer, on one process."""
    stages = [Hidden(None, stage) for stage in range(num_stages)]
    words = weights().requires_grad_()
    losses = []
    for microbatch in range(num_microbatches):
        value = None
        for index, stage in enumerate(stages):
            value = stage(Pass(F, index, microbatch), value)
        loss = torch.nn.functional.cross_entropy(
            value @ words.t(), targets(microbatch), reduction='sum'
        )
        losses.append(loss.item())
        loss.backward()
    return losses, [[p.grad for p in stage.parameters()] for stage in stages], words.grad
