"""Shards of the output layer and of the embedding: rows, and what is made of them.

(Vocabulary Parallelism, arXiv 2411.05288, of which Algorithm 2.) With Y = X W^T of the rows of
this rank, a token has its largest logit m, the sum s of exp(Y - m), and the logit t of its target,
0 where that is in another shard. Of all shards M = max m, sum S = sum s exp(m - M),
loss = log S + M - sum t; and the softmax
over all words is that over the shard times alpha = s exp(m - M) / S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor

_EMBEDDING = 'embedding.word_embeddings.weight'
# as Megatron marks the weights of both layers
_MARKS = {
    'tensor_model_parallel': True,
    'partition_dim': 0,
    'partition_stride': 1,
    'allreduce': True,
    'is_embedding_or_output_parameter': True,
}


class Taken(NamedTuple):
    """Tensors that the model gives to the output layer and to its loss in one forward."""

    hidden: torch.Tensor  # output of the last layer, (sequence, micro batch, hidden size)
    labels: torch.Tensor  # (micro batch, sequence)
    # zeros of that shape in place of the losses, which a program's loss function takes
    losses: torch.Tensor


class Logits(NamedTuple):
    """Results of S that T needs; N tokens, each a row."""

    hidden: torch.Tensor  # (N, hidden size)
    softmax: torch.Tensor  # over the words of the shard, (N, words)
    targets: torch.Tensor  # their places in the shard, (N,); any where they are in another one
    here: torch.Tensor  # whether they are in this one, (N,)
    statistics: torch.Tensor  # m, s and t, (3, N)


class Part(NamedTuple):
    """A part of the gradient of hidden states, (N, hidden size): `away` x alpha - `there`."""

    away: torch.Tensor  # softmax x W
    there: torch.Tensor  # the rows of W of the targets


class OutputShard(ColumnParallelLinear):
    """This rank's rows of the output layer's weight, or (`rows` is None) of a tied embedding."""

    def __init__(
        self, model: Any, rows: torch.Tensor | None, tied: InputShard | None = None
    ) -> None:
        super().__init__(
            model.config.hidden_size,
            model.vocab_size,
            config=model.config,
            init_method=model.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=model.pg_collection.mp,
        )
        self.weight = None if rows is None else _parameter(rows)
        self._tied = () if tied is None else (tied,)  # no module of this one
        if self._tied:  # what checkpoints have of it is in the embedding
            self._register_load_state_dict_pre_hook(_without_weight)
        self.tp, self.place = model.pg_collection.tp, model.pg_collection.mp.rank()
        self.listening = False
        self.taken: Taken | None = None

    @property
    def is_tied(self) -> bool:
        """True if the embedding has the same rows."""
        return bool(self._tied)

    @property
    def rows(self) -> torch.nn.Parameter:
        """The weight of its words."""
        found = self._tied[0].rows if self._tied else self.weight
        assert found is not None, 'of a tied embedding, else its own'
        return found

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
            logits = functools.partial(self._logits, targets=targets)
            return self._tied[0](input_, logits) if self._tied else logits(input_)
        if not self.listening:
            raise NotImplementedError(
                'the output layer is on all pipeline ranks, and the model was called by itself: '
                'run it by a schedule, or leave out --pipeline-vocab-parallel'
            )
        # MambaStack of 0.16 returns a view, whose memory could not be freed
        return make_viewless_tensor(input_, input_.requires_grad, keep_graph=True), None

    def loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Take note of what would be computed here, in place of `compute_language_model_loss`."""
        losses = torch.zeros(labels.shape, device=labels.device, requires_grad=True)
        self.taken = Taken(logits, labels, losses)
        return losses

    def _logits(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[Logits, Part]:
        with torch.no_grad():
            softmax = (hidden @ self.rows.t()).float()
            words = softmax.size(1)
            targets = targets - words * self.place
            here = (targets >= 0) & (targets < words)
            targets = targets.clamp(0, words - 1)
            found = softmax.gather(1, targets[:, None])[:, 0] * here
            most = softmax.max(1).values
            sums = softmax.sub_(most[:, None]).exp_().sum(1)
            softmax.div_(sums[:, None])
            away = softmax.to(self.rows.dtype) @ self.rows
            there = self.rows[targets] * here[:, None]
            own = torch.stack([most, sums, found])
            return Logits(hidden, softmax, targets, here, own), Part(away, there)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return what checkpoints hold of it; words may be padded otherwise in others."""
        if self._tied:
            return self._sharded_copy(*args, **kwargs)
        found = super().sharded_state_dict(*args, **kwargs)
        for key, tensor in found.items():
            if key.endswith('weight'):
                tensor.allow_shape_mismatch = True
        return found

    def _sharded_copy(
        self, prefix: str = '', sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        groups = metadata['dp_cp_group']
        copy = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.rows.detach(),
            key=prefix.removesuffix('output_layer.') + _EMBEDDING,
            replica_id=(1, 0, groups.rank()),
            allow_shape_mismatch=True,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=groups,
        )
        return {f'{prefix}weight': copy}


def _without_weight(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(f'{prefix}weight', None)


def _parameter(rows: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(rows)
    for name, value in _MARKS.items():
        setattr(made, name, value)
    return made


class InputShard(VocabParallelEmbedding):
    """The rows of the word embedding that this rank has; on the first stage, what all have found.

    Args:
        groups: of the model's ranks.
        rows: of the embedding's weight; None: another chunk of this rank has them.
        whole: the embedding as Megatron made it, on the first stage.

    Attributes:
        given: in a forward of the first stage, the sum of the rows that the shards of the pipeline
            have of its tokens, (micro batch, sequence, hidden size).
        tokens: of the first microbatch, as they were read for all ranks; none once compared.
    """

    def __init__(
        self, groups: Any, rows: torch.Tensor | None, whole: VocabParallelEmbedding | None
    ) -> None:
        torch.nn.Module.__init__(self)  # Megatron's draws rows
        self.weight = None if rows is None else _parameter(rows)  # pyright: ignore[reportAttributeAccessIssue]
        self.tp_group, self.tp, self.place = groups.mp, groups.tp, groups.mp.rank()
        self.reduce_scatter_embeddings = whole is not None and whole.reduce_scatter_embeddings
        self.given: torch.Tensor | None = None
        self.tokens: torch.Tensor | None = None

    @property
    def rows(self) -> torch.nn.Parameter:
        """The weight of its words."""
        assert self.weight is not None, 'another chunk has it'
        return self.weight

    def forward(
        self, input_: torch.Tensor, reads: Callable[[torch.Tensor], Any] | None = None
    ) -> Any:
        """Return the rows of the tokens, which the shards have been asked for before.

        Args:
            input_: tokens, or what `reads` takes.
            reads: a function that reads rows: its result is returned. Rows are read within calls
                of this module alone: DDP's hook waits for their gather, and others may have theirs.

        Raises:
            NotImplementedError: a model is called, and not by a schedule.
        """
        if reads is not None:
            return reads(input_)
        if self.given is None:
            raise NotImplementedError(
                'the embedding is on all pipeline ranks, and the model was called by itself: '
                'run it by a schedule, or leave out --pipeline-vocab-parallel'
            )
        if self.tokens is not None and self.tokens.numel():
            if not torch.equal(self.tokens[:, : input_.size(1)], input_):
                raise NotImplementedError(
                    'other tokens in the second call of forward_step are unsupported because the '
                    'embedding is on all pipeline ranks, which get the tokens of the first: let '
                    'them follow from the data alone, or leave out --pipeline-vocab-parallel'
                )
            self.tokens = self.tokens[:0]
        if self.reduce_scatter_embeddings:
            rows = self.given.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp)
        return reduce_from_tensor_model_parallel_region(self.given, group=self.tp)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens, zeros where another shard has them: for `forward`."""
        places, here = self._places(tokens)
        return torch.nn.functional.embedding(places, self.rows) * here[..., None]

    def scatter(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of what was looked up to that of the rows; hooks of DDP see it."""
        places, here = self._places(tokens)
        own, count = gradient * here[..., None], self.rows.size(0)
        found = torch.ops.aten.embedding_dense_backward(own, places, count, -1, False)
        self.rows.view_as(self.rows).backward(found)

    def summed(
        self, found: torch.Tensor | None, tokens: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum `found` (None: none) of gradients and of one more, in fp32."""
        places, here = self._places(tokens)
        if found is None:
            found = torch.zeros_like(self.rows, dtype=torch.float32)
        rows = (gradient * here[..., None]).flatten(0, 1).to(found.dtype)
        return found.index_add_(0, places.flatten(), rows)

    @torch.no_grad()
    def add(self, gradient: torch.Tensor) -> None:
        """Add to the gradient that T has left; no hook sees it."""
        left = getattr(self.rows, 'main_grad', None)
        left = self.rows.grad if left is None else left
        assert left is not None, 'T comes before'
        left.add_(gradient)

    def _places(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of tokens among the rows, and whether they are there."""
        words = self.rows.size(0)
        places = tokens - words * self.place
        here = (places >= 0) & (places < words)
        return places.clamp(0, words - 1), here

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the entries of a sharded checkpoint."""
        return {} if self.weight is None else super().sharded_state_dict(*args, **kwargs)


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
