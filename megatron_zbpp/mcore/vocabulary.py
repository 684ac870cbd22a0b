"""A shard of the output layer: rows of its weight, and what Algorithm 2 makes of them.

(Vocabulary Parallelism, arXiv 2411.05288.) With Y = X W^T of the rows of this rank, a token has its
largest logit m, the sum s of exp(Y - m), and the logit t of its target, 0 where that is in another
shard. Of all shards M = max m, sum S = sum s exp(m - M), loss = log S + M - sum t; and the softmax
over all words is that over the shard times alpha = s exp(m - M) / S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear


class Taken(NamedTuple):
    """Tensors that the model gives to the output layer and to its loss in one forward.

    Attributes:
        hidden: output of the last layer, (sequence, micro batch, hidden size).
        labels: (micro batch, sequence).
        losses: zeros of that shape in place of the losses, which a program's loss function takes.
    """

    hidden: torch.Tensor
    labels: torch.Tensor
    losses: torch.Tensor


class Logits(NamedTuple):
    """Results of S that T needs; N tokens, each a row.

    Attributes:
        hidden: (N, hidden size).
        softmax: over the words of the shard, (N, words).
        targets: their places in the shard, (N,); any where they are in another one.
        here: whether they are in this one, (N,).
        statistics: m, s and t, (3, N).
    """

    hidden: torch.Tensor
    softmax: torch.Tensor
    targets: torch.Tensor
    here: torch.Tensor
    statistics: torch.Tensor


class Part(NamedTuple):
    """A part of the gradient of hidden states, (N, hidden size): `away` x alpha - `there`.

    Attributes:
        away: softmax x W.
        there: the rows of W of the targets.
    """

    away: torch.Tensor
    there: torch.Tensor


class OutputShard(ColumnParallelLinear):
    """The rows of the output layer's weight that this rank has, among those of a whole model.

    Args:
        model: whose output layer it is.
        rows: of its weight.
    """

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        super().__init__(
            model.config.hidden_size,
            model.vocab_size,
            config=model.config,
            init_method=model.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=model.pg_collection.mp,
        )
        self.weight = torch.nn.Parameter(rows)
        # as Megatron marks an output layer's
        marks = {
            'tensor_model_parallel': True,
            'partition_dim': 0,
            'partition_stride': 1,
            'allreduce': True,
            'is_embedding_or_output_parameter': True,
        }
        for name, value in marks.items():
            setattr(self.weight, name, value)
        self.tp, self.place = model.pg_collection.tp, model.pg_collection.mp.rank()
        self.listening = False
        self.taken: Taken | None = None

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        targets: torch.Tensor | None = None,
    ) -> Any:
        """Return logits of a shard for given `targets`; else, to the model, what it gives.

        Raises:
            NotImplementedError: a model is called, and not by a schedule.
        """
        if targets is not None:
            return self._logits(input_, targets)
        if not self.listening:
            raise NotImplementedError(
                'the output layer is on all pipeline ranks, and the model was called by itself: '
                'run it by a schedule, or leave out --pipeline-vocab-parallel'
            )
        return input_, None

    def loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Take note of what would be computed here, in place of `compute_language_model_loss`."""
        losses = torch.zeros(labels.shape, device=labels.device, requires_grad=True)
        self.taken = Taken(logits, labels, losses)
        return losses

    def _logits(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[Logits, Part]:
        with torch.no_grad():
            softmax = (hidden @ self.weight.t()).float()
            words = softmax.size(1)
            targets = targets - words * self.place
            here = (targets >= 0) & (targets < words)
            targets = targets.clamp(0, words - 1)
            found = softmax.gather(1, targets[:, None])[:, 0] * here
            most = softmax.max(1).values
            sums = softmax.sub_(most[:, None]).exp_().sum(1)
            softmax.div_(sums[:, None])
            away = softmax.to(self.weight.dtype) @ self.weight
            there = self.weight[targets] * here[:, None]
            own = torch.stack([most, sums, found])
            return Logits(hidden, softmax, targets, here, own), Part(away, there)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what checkpoints hold of it; words may be padded otherwise in others."""
        found = super().sharded_state_dict(*args, **kwargs)
        for key, tensor in found.items():
            if key.endswith('weight'):
                tensor.allow_shape_mismatch = True
        return found


def combined(statistics: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return M, S and the target's logit of several shards together, (3, N)."""
    most, sums, found = torch.stack(list(statistics)).unbind(1)
    top = most.amax(0)
    return torch.stack([top, (sums * (most - top).exp()).sum(0), found.sum(0)])


def share(own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return alpha, of (N, 1): what the softmax over a shard is of that over all words."""
    return (own[1] * (own[0] - whole[0]).exp() / whole[1])[:, None]


def losses_of(whole: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token, (N,)."""
    top, total, found = whole
    return total.log() + top - found


@torch.no_grad()
def weight_gradient(made: Logits, whole: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the shard's rows, into what S has left.

    Args:
        made: by S; its softmax is written over.
        whole: statistics of all shards.
        weights: gradients of the losses of tokens, (N,).
    """
    rows = torch.arange(len(weights), device=weights.device)
    gradient = made.softmax.mul_(share(made.statistics, whole))
    gradient[rows, made.targets] -= made.here.to(gradient.dtype)
    return gradient.mul_(weights[:, None]).to(made.hidden.dtype).t() @ made.hidden


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the tensors of all ranks of a group."""
    if group.size() == 1:
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return found
