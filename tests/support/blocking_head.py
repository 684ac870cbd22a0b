"""Blocking S: the output layer over the ranks of any group, by Megatron's own functions alone.

Logits, loss and both gradients of a microbatch at once; every rank waits for all others. It is the
oracle of S and T. No schedule runs it, so it is no part of the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, cross_entropy
from megatron.core.transformer import TransformerConfig


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

    def config(self, **more: Any) -> TransformerConfig:
        """Return Megatron's."""
        size, dtype = self.weight.size(1), self.weight.dtype
        bf16 = {'bf16': True} if dtype is torch.bfloat16 else {}
        fields = {'num_layers': 4, 'hidden_size': size, 'num_attention_heads': 4} | bf16
        return TransformerConfig(**fields, params_dtype=dtype, pipeline_dtype=dtype, **more)

    def model(self, last: bool, **more: Any) -> GPTModel:
        """Return the GPT, or the part of a rank, the `last` or not; weights are as drawn."""
        words, tokens = len(self.weight), self.labels.size(1)
        spec, first = get_gpt_layer_local_spec(), not more.get('pipeline_model_parallel_size')
        return GPTModel(self.config(**more), spec, words, tokens, first, last)


class Found(NamedTuple):
    """Results of a microbatch on a rank."""

    losses: torch.Tensor  # of tokens, (micro batch, sequence)
    hidden: torch.Tensor  # gradient of hidden states, (sequence, micro batch, hidden size)
    weight: torch.Tensor  # gradient of the rank's rows, (words, hidden size)
    # largest logit of each token, and that of its target: (2, micro batch, sequence)
    exact: torch.Tensor


def blocking(head: Head, group: dist.ProcessGroup) -> Found:
    """Return what comes of a microbatch over the ranks of a group: a collective."""
    words, size = head.weight.shape
    config = head.config()
    layer = ColumnParallelLinear(
        size, words, config=config, init_method=config.init_method, bias=False, tp_group=group
    )
    with _loss_over(group) as loss:

        def of_labels(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return loss(logits, labels.t().contiguous()).t()

        return _trained(head, layer, group, of_labels)


def of_tensor_parallelism(head: Head, group: dist.ProcessGroup) -> Found:
    """Return the same of a whole model's head; the group is Megatron's tensor-parallel one."""
    model = head.model(last=True, tensor_model_parallel_size=group.size())
    return _trained(head, model.output_layer, group, model.compute_language_model_loss)


def _trained(head: Head, layer: Any, group: dist.ProcessGroup, loss: Callable) -> Found:
    with torch.no_grad():
        layer.weight.copy_(head.rows(group))
    hidden = head.hidden.clone().requires_grad_()
    logits = layer(hidden)[0]
    words = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(words, logits.detach(), group=group)
    whole = torch.cat(words, -1).float().transpose(0, 1)
    exact = whole.amax(-1), whole.gather(-1, head.labels[..., None])[..., 0]
    losses = loss(head.labels, logits)
    (losses * head.weights).sum().backward()
    return Found(losses.detach(), hidden.grad, layer.weight.grad, torch.stack(exact))


@contextmanager
def _loss_over(group: dist.ProcessGroup) -> Iterator[Callable]:
    """Yield Megatron's loss of logits whose words the ranks of a group share out.

    Until 0.18 it asks for the tensor-parallel group, whoever calls it.
    """
    loss = cross_entropy.vocab_parallel_cross_entropy
    if 'tp_group' in inspect.signature(loss).parameters:
        yield lambda logits, targets: loss(logits, targets, tp_group=group)
        return
    asked = {'group': group, 'rank': group.rank(), 'world_size': group.size()}
    with ExitStack() as stack:
        for name, found in asked.items():
            name = f'get_tensor_model_parallel_{name}'
            fake = mock.patch.object(cross_entropy, name, lambda found=found: found)
            stack.enter_context(fake)
        yield loss
