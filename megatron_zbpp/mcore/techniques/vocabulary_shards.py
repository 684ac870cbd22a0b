"""Shards of the output layer and of the embedding, in each rank's last chunk.

The rank that has a layer makes it as Megatron does, with the values that it draws, and gives each
rank its rows before DDP takes notice of any parameter. In checkpoints it is one tensor as ever.

(Vocabulary Parallelism, arXiv 2411.05288, of which Algorithm 2.) With Y = X W^T of the rows of
this rank, a token has its largest logit m, the sum s of exp(Y - m), and the logit t of its target,
0 where that is in another shard. Of all shards M = max m, sum S = sum s exp(m - M),
loss = log S + M - sum t; and the softmax over all words is that over the shard times
alpha = s exp(m - M) / S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import lcm
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint, make_viewless_tensor

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.patches.registry import Patch, around
from megatron_zbpp.techniques.composition import BOTH

DROP = 'or leave out --pipeline-vocab-parallel'
_CALLED_ALONE = (
    f'on all pipeline ranks, and the model was called by itself: run it by a schedule, {DROP}'
)
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


class OutputShard(tensor_parallel.ColumnParallelLinear):
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
        self.is_tied = tied is not None  # the embedding has the same rows
        self._tied: Any
        vars(self)['_tied'] = tied  # no module of this one
        if self.is_tied:  # what checkpoints have of it is in the embedding
            self._register_load_state_dict_pre_hook(
                lambda state, prefix, *_: state.pop(f'{prefix}weight', None)
            )
        self.tp, self.place = model.pg_collection.tp, model.pg_collection.mp.rank()
        self.listening = False
        self.taken: Taken | None = None

    @property
    def rows(self) -> torch.nn.Parameter:
        """The weight of its words."""
        return cast(Any, self.weight) if self._tied is None else self._tied.rows

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        targets: torch.Tensor | None = None,
    ) -> Any:
        """Return logits of a shard for given `targets`; else, to the model, what it gives."""
        if targets is not None:
            logits = functools.partial(self._logits, targets=targets)
            return logits(input_) if self._tied is None else self._tied(input_, logits)
        if not self.listening:
            raise NotImplementedError(f'the output layer is {_CALLED_ALONE}')
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
            targets, here = _places(targets, softmax.size(1), self.place)
            found = softmax.gather(1, targets[:, None])[:, 0] * here
            most = softmax.max(1).values
            sums = softmax.sub_(most[:, None]).exp_().sum(1)
            softmax.div_(sums[:, None])
            away = softmax.to(self.rows.dtype) @ self.rows
            there = self.rows[targets] * here[:, None]
            own = torch.stack([most, sums, found])
            return Logits(hidden, softmax, targets, here, own), Part(away, there)

    def sharded_state_dict(
        self, prefix: str = '', sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the entries of a sharded checkpoint; words may be padded otherwise in others."""
        if not self.is_tied:
            found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            for key, tensor in found.items():
                if key.endswith('weight'):
                    tensor.allow_shape_mismatch = True
            return found
        groups = metadata['dp_cp_group']
        copy = make_tp_sharded_tensor_for_checkpoint(
            self.rows.detach(),
            prefix.removesuffix('output_layer.') + _EMBEDDING,
            replica_id=(1, 0, groups.rank()),
            allow_shape_mismatch=True,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=groups,
        )
        return {f'{prefix}weight': copy}


def _parameter(rows: torch.Tensor) -> torch.nn.Parameter:
    made = torch.nn.Parameter(rows)
    vars(made).update(_MARKS)
    return made


class InputShard(tensor_parallel.VocabParallelEmbedding):
    """The rows of the word embedding that this rank has; on the first stage, what all have found.

    Without `rows` another chunk of this rank has them. On the first stage `whole` is the embedding
    as Megatron made it.
    """

    def __init__(self, groups: Any, rows: torch.Tensor | None, whole: Any) -> None:
        torch.nn.Module.__init__(self)  # Megatron's draws rows
        self.weight = None if rows is None else _parameter(rows)  # pyright: ignore[reportAttributeAccessIssue]
        self.tp_group, self.tp, self.place = groups.mp, groups.tp, groups.mp.rank()
        self.reduce_scatter_embeddings = whole is not None and whole.reduce_scatter_embeddings
        # in a forward of the first stage, the sum of the rows that the shards of the pipeline have
        # of its tokens, (micro batch, sequence, hidden size)
        self.given: torch.Tensor | None = None
        # of the first microbatch, as they were read for all ranks; none once compared
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

        With `reads`, a function that reads rows, return its result. Rows are read within calls of
        this module alone: DDP's hook waits for their gather, and others may have theirs.
        """
        if reads is not None:
            return reads(input_)
        if self.given is None:
            raise NotImplementedError(f'the embedding is {_CALLED_ALONE}')
        if self.tokens is not None and self.tokens.numel():
            if not torch.equal(self.tokens[:, : input_.size(1)], input_):
                raise NotImplementedError(
                    'other tokens in the second call of forward_step are unsupported because the '
                    'embedding is on all pipeline ranks, which get the tokens of the first: let '
                    f'them follow from the data alone, {DROP}'
                )
            self.tokens = self.tokens[:0]
        if self.reduce_scatter_embeddings:
            rows = self.given.transpose(0, 1).contiguous()
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(rows, group=self.tp)
        return tensor_parallel.reduce_from_tensor_model_parallel_region(self.given, group=self.tp)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens, zeros where another shard has them: for `forward`."""
        places, here = _places(tokens, self.rows.size(0), self.place)
        return torch.nn.functional.embedding(places, self.rows) * here[..., None]

    def scatter(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of what was looked up to that of the rows; hooks of DDP see it."""
        places, here = _places(tokens, self.rows.size(0), self.place)
        own, count = gradient * here[..., None], self.rows.size(0)
        found = torch.ops.aten.embedding_dense_backward(own, places, count, -1, False)
        self.rows.view_as(self.rows).backward(found)

    def summed(self, found: Any, tokens: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum `found` (None: none) of gradients and of one more, in fp32."""
        places, here = _places(tokens, self.rows.size(0), self.place)
        if found is None:
            found = torch.zeros_like(self.rows, dtype=torch.float32)
        rows = (gradient * here[..., None]).flatten(0, 1).to(found.dtype)
        return found.index_add_(0, places.flatten(), rows)

    @torch.no_grad()
    def add(self, gradient: torch.Tensor) -> None:
        """Add to the gradient that T has left; no hook sees it."""
        left: Any = getattr(self.rows, 'main_grad', None)
        left = self.rows.grad if left is None else left
        left.add_(gradient)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the entries of a sharded checkpoint."""
        return {} if self.weight is None else super().sharded_state_dict(*args, **kwargs)


def _places(tokens: torch.Tensor, words: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of tokens among the words of a shard, and whether they are there."""
    places = tokens - words * shard
    here = (places >= 0) & (places < words)
    return places.clamp(0, words - 1), here


def combined(statistics: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return M, S and the target's logit of several shards together, (3, N)."""
    most, sums, found = torch.stack([*statistics]).unbind(1)
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
    """Return the gradient of the shard's rows, into what S has left: its softmax is written over.

    `whole` are the statistics of all shards, `weights` gradients of the losses of tokens, (N,).
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


_PADDING = 128  # Megatron's default of --make-vocab-size-divisible-by

Collective = Callable[[str], AbstractContextManager]


def patches(num_chunks: int, collective: Collective, both: bool) -> Iterator[Patch]:
    """Yield what divides the output layer."""
    first: list[Any] = []  # gets the chunk of this rank with the embedding

    def init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.config.pipeline_model_parallel_size == 1:
            return
        vp_stage = getattr(self, 'vp_stage', None)  # MambaModel of 0.16 has one chunk
        if vp_stage in (None, 0):
            first.clear()
        if self.pre_process:
            first.append(self)
        if vp_stage in (None, num_chunks - 1):
            with collective('shards of the output layer'):
                divide(self, both, *first)
            first.clear()
        if both:  # tied rows have one gradient, and no second weight
            self.share_embeddings_and_output_weights = False

    for module, name in compat.models_and_stacks()[0]:
        if name != 'BertModel':  # it has several losses
            yield Patch(f'{module}:{name}', '__init__', around(init))


def divide(model: Any, both: bool = False, first: Any = None) -> None:
    """Give the chunk of each pipeline rank its shards: a collective.

    Raise NotImplementedError, with the cure, where the output layer cannot be divided.
    """
    groups, last = model.pg_collection, model.post_process
    told: list[str | None] = [None] * groups.pp.size()  # the layer is on one rank alone
    dist.all_gather_object(told, _problem(model, groups.mp.size(), both), group=groups.pp)
    if problem := next(filter(None, told), None):
        raise NotImplementedError(f'{problem}, {DROP}')
    tied = model.share_embeddings_and_output_weights
    layer = model.output_layer if last and not tied else None
    if both:
        embedding = None if first is None else first.embedding.word_embeddings
        shard = InputShard(groups, _own_rows(model, embedding), embedding)
        if first is not model:
            model.embedding = MegatronModule(model.config)
            if first is not None:
                first.embedding.word_embeddings = InputShard(groups, None, embedding)
        model.embedding.word_embeddings = shard
    rows = None if tied else _own_rows(model, layer)
    words: Any = model.embedding.word_embeddings if tied else None
    model.output_layer = OutputShard(model, rows, words)
    if last:
        model.compute_language_model_loss = model.output_layer.loss


def _own_rows(model: Any, layer: Any) -> torch.Tensor:
    """Return this rank's rows of a layer's weight, which one pipeline rank has: `layer`."""
    groups, size = model.pg_collection, model.pg_collection.mp.size()
    told: list[Any] = [None] * groups.pp.size()
    dist.all_gather_object(told, (groups.mp.rank(), layer is not None), group=groups.pp)
    shape, dtype = (model.vocab_size // size, model.config.hidden_size), model.config.params_dtype
    rows, parts = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device()), None
    if layer is not None:
        whole = torch.cat(gathered(layer.weight.detach().to(rows.device), groups.tp))
        parts = [whole.chunk(size)[place].contiguous() for place, _ in told]
    (root,) = [rank for rank, (_, has) in enumerate(told) if has]
    dist.scatter(rows, parts, dist.get_process_group_ranks(groups.pp)[root], group=groups.pp)
    return rows


def _problem(model: Any, size: int, both: bool) -> str | None:
    name, layer = type(model).__name__, getattr(model, 'output_layer', None)
    if model.share_embeddings_and_output_weights and not both:
        return (
            f'share_embeddings_and_output_weights: the output layer of this {name} is the '
            'embedding, which is on the first stage alone: give --pipeline-vocab-parallel '
            f'{BOTH}, or --untie-embeddings-and-output-weights'
        )
    if type(model).compute_language_model_loss is not LanguageModule.compute_language_model_loss:
        return (
            f'compute_language_model_loss: {name} has a loss of its own (label smoothing, '
            "distillation), of which shards know nothing: take Megatron's"
        )
    scale = '_scale_logits'  # none until 0.16
    if getattr(type(model), scale, None) is not getattr(LanguageModule, scale, None):
        return f"{scale}: {name} scales or caps its logits, which shards do not: take Megatron's"
    plain = type(layer) is tensor_parallel.ColumnParallelLinear and not layer.gather_output
    if layer is not None and not plain:
        return (
            f'output_layer: that of this {name} is a {type(layer).__name__} that does more than '
            "Megatron's (logits asked for, or capped): take Megatron's"
        )
    if model.vocab_size % size:
        words = lcm(_PADDING, model.pg_collection.pp.size())
        return (
            f'a vocabulary of {model.vocab_size} words does not divide among {size} ranks: give '
            f'--make-vocab-size-divisible-by {words}'
        )
    return None
