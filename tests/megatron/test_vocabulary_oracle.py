"""S and T over the ranks of a pipeline are close to Megatron's tensor-parallel head over them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from example import forget_groups
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from models import Job


class Head(NamedTuple):
    """An output layer and inputs of a microbatch, alike on all ranks."""

    weight: torch.Tensor  # of all words, (words, hidden size)
    hidden: torch.Tensor  # (sequence, micro batch, hidden size)
    labels: torch.Tensor  # (micro batch, sequence)
    weights: torch.Tensor  # gradients of the losses of tokens, of that shape

    @classmethod
    def draw(cls, dtype: torch.dtype) -> Head:
        """Return one of 48 words, with 2 sequences of 12 tokens; some losses are masked."""
        drawing = torch.Generator().manual_seed(3)
        weight = torch.randn(48, 16, generator=drawing) * 0.5
        hidden = torch.randn(12, 2, 16, generator=drawing)
        labels = torch.randint(len(weight), (2, 12), generator=drawing)
        weights = torch.rand(2, 12, generator=drawing)
        return cls(weight.to(dtype), hidden.to(dtype), labels, weights * (weights > 0.2))

    def rows(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Return those of this rank's shard."""
        return self.weight.chunk(group.size())[group.rank()]

    def model(self, last: bool, **more: Any) -> GPTModel:
        """Return the GPT, or the part of a rank, the `last` or not; weights are as drawn."""
        (words, size), dtype = self.weight.shape, self.weight.dtype
        fields = {'num_layers': 4, 'hidden_size': size, 'num_attention_heads': 4}
        fields |= {'bf16': dtype is torch.bfloat16, 'params_dtype': dtype, 'pipeline_dtype': dtype}
        first = not more.get('pipeline_model_parallel_size')
        config, tokens = TransformerConfig(**fields, **more), self.labels.size(1)
        return GPTModel(config, get_gpt_layer_local_spec(), words, tokens, first, last)


class Found(NamedTuple):
    """Results of a microbatch on a rank."""

    losses: torch.Tensor  # of tokens, (micro batch, sequence)
    hidden: torch.Tensor  # gradient of hidden states, (sequence, micro batch, hidden size)
    weight: torch.Tensor  # gradient of the rank's rows, (words, hidden size)
    # largest logit of each token, and that of its target: (2, micro batch, sequence)
    exact: torch.Tensor


def of_tensor_parallelism(head: Head, group: dist.ProcessGroup) -> Found:
    """Return what comes of a microbatch by Megatron's own tensor-parallel head, on its group."""
    model = head.model(last=True, tensor_model_parallel_size=group.size())
    layer = model.output_layer
    with torch.no_grad():
        layer.weight.copy_(head.rows(group))
    hidden = head.hidden.clone().requires_grad_()
    logits = layer(hidden)[0]
    words = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(words, logits.detach(), group=group)
    whole = torch.cat(words, -1).float().transpose(0, 1)
    exact = whole.amax(-1), whole.gather(-1, head.labels[..., None])[..., 0]
    losses = model.compute_language_model_loss(head.labels, logits)
    (losses * head.weights).sum().backward()
    return Found(losses.detach(), hidden.grad, layer.weight.grad, torch.stack(exact))


RANKS = 4
TYPES = torch.float32, torch.bfloat16


def both(pipeline, tensor):
    """Runs on a rank: by type, S and T over the ranks of a pipeline, and Megatron's head over the
    same ranks. Both have the same weights and hidden states."""
    import pretrain_gpt as script
    from megatron.core import parallel_state

    heads = {dtype: Head.draw(dtype) for dtype in TYPES}
    try:
        script.initialize(script.parse_args(pipeline))
        group = parallel_state.get_pipeline_model_parallel_group()
        found = {dtype: in_two_passes(head, group) for dtype, head in heads.items()}
        forget_groups()
        script.initialize(script.parse_args(tensor))
        group = parallel_state.get_tensor_model_parallel_group()
        return {t: (found[t], of_tensor_parallelism(head, group)) for t, head in heads.items()}
    finally:
        forget_groups()


def in_two_passes(head, group):
    """S and T of Algorithm 2, with the collectives between them."""
    from megatron_zbpp.mcore.techniques import vocabulary_shards as vocabulary
    from megatron_zbpp.mcore.techniques.split_vocabulary import shard_of
    from megatron_zbpp.mcore.techniques.vocabulary_shards import divide

    model = head.model(group.rank() == RANKS - 1, pipeline_model_parallel_size=RANKS)
    divide(model)
    shard = shard_of(model)
    shard.weight.data.copy_(head.rows(group))
    rows = head.labels.t().shape
    weights = head.weights.t().flatten()
    made, part = shard(head.hidden.flatten(0, 1), targets=head.labels.t().flatten())
    whole = vocabulary.combined(vocabulary.gathered(made.statistics, group))
    own = part.away * vocabulary.share(made.statistics, whole) - part.there
    hidden = own.to(part.away.dtype)
    dist.all_reduce(hidden, group=group)
    return Found(
        vocabulary.losses_of(whole).view(rows).t(),
        (hidden * weights[:, None]).to(hidden.dtype).view_as(head.hidden),
        vocabulary.weight_gradient(made, whole, weights),
        torch.stack([whole[0], whole[2]]).view(2, *rows).transpose(1, 2),
    )


@pytest.fixture(scope='module')
def found(ranks, data):
    """Results of `both`."""
    sizes = {'pp': RANKS}, {'pp': 1, 'tp': RANKS}
    return ranks(RANKS).run(
        both, *(Job(layers=1, **each).argv('megatron', False, data) for each in sizes)
    )


# shares of the largest value. A shard divides by its own sum and alpha corrects that: the same sums
# in another order. In bf16 the parts of dX cancel each other, and each rank rounds its own
NEAR = {
    torch.float32: {'losses': 2e-7, 'hidden': 1e-6, 'weight': 1e-6},
    torch.bfloat16: {'losses': 2e-7, 'hidden': RANKS * 2**-7, 'weight': 2**-8},
}


@pytest.mark.parametrize('dtype', TYPES)
def test_s_and_t_are_close_to_tensor_parallelism(found, dtype):
    """To the bit are the logits that enter sums: the largest ones, and those of targets."""
    for of_rank in found:
        shards, stock = of_rank[dtype]
        assert torch.equal(shards.exact, stock.exact)
        for name, share in NEAR[dtype].items():
            ours, theirs = (getattr(each, name) for each in (shards, stock))
            assert theirs.abs().max() > 1
            assert ours.dtype == theirs.dtype
            assert (ours - theirs).abs().max() <= share * theirs.abs().max(), name
