"""Hops of models whose stages exchange more than one tensor of one shape, told by the model.

A chunk tells by a method `hops(shape, dtype)` of its own: it gets the shape (sequence, micro batch,
hidden) on this rank and the pipeline's dtype, and returns what it takes and what it gives, each a
list of (shape, dtype); None: whatever the neighbour says. Of Megatron's own models those with
manifold-constrained hyper-connections (mHC) widen what is exchanged, which their config tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.iteration.batch import Executors
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.runtime.messages import Hop
from megatron_zbpp.runtime.stage import Backward, ForwardStep, StepOutput, Wrapper

METHOD = 'hops'
_SEVERAL = 'the stages of this model exchange several tensors'
_WIDE = 'the stages of this model exchange tensors that differ from edge to edge'
_Told = tuple[tuple[tuple[int, ...], torch.dtype], ...] | None


def with_hops(
    executors: Executors,  # those of one tensor of one shape
    chunks: Sequence[torch.nn.Module],  # of this rank, unwrapped
    model: torch.nn.Module,  # the first of them, as it is called
    hops: Sequence[tuple[Message, ...]],  # what Megatron says that neighbours exchange, by slice
) -> Executors:
    """Return executors that know the edges: a model's first call of a size is a collective."""
    session, lowered = executors.session, executors.context.lowered
    if hops[0][0].shape is None:
        if any(hasattr(chunk, METHOD) for chunk in chunks):
            raise NotImplementedError(f'{_WIDE}: leave out --variable-seq-lengths')
        return executors  # each message tells its shape
    known = session.edges.setdefault(model, {})
    if hops[0] not in known:
        with session.watchdog.collective('handshake about shapes of messages'):
            known[hops[0]] = _agreed(chunks, hops[0], lowered.placement, executors.pipeline)
    edges: dict[int, Hop] = known[hops[0]]
    several = any(len(hop) > 1 for hop in edges.values())
    # a schedule may do more than such hops can
    cures = [face.no_hops for face in executors.faces if several or not face.takes_wide]
    if several and lowered.moves:
        cures.append('leave out offload, or take a schedule without eviction')
    for cure in filter(None, cures):
        raise NotImplementedError(f'{_SEVERAL if several else _WIDE}: {cure}')
    own = {METHOD: HopWrapper} if several else {}
    return replace(executors, wraps={**own, **executors.wraps}, edges=edges)


def _agreed(
    models: Sequence[torch.nn.Module],
    message: tuple[Message, ...],
    placement: Placement,
    pipeline: dist.ProcessGroup,
) -> dict[int, Hop]:
    held = placement.stages(pipeline.rank())
    own = {stage: _told(model, message) for stage, model in zip(held, models, strict=True)}
    gathered: list[dict[int, tuple[_Told, _Told]]] = [{} for _ in range(pipeline.size())]
    dist.all_gather_object(gathered, own, group=pipeline)
    told = {stage: sides for each in gathered for stage, sides in each.items()}
    device, edges = message[0].device, {}
    usual = tuple((each.shape or (), each.dtype) for each in message)
    for stage in range(placement.num_stages - 1):
        gives, takes = told[stage][1], told[stage + 1][0]
        if None not in (gives, takes) and gives != takes:
            raise ValueError(
                f'stage {stage} gives {_in_words(gives)}, but stage {stage + 1} takes '
                f'{_in_words(takes)}: have {METHOD}(shape, dtype) of both models tell the same'
            )
        hop = gives or takes or usual
        edges[stage] = tuple(Message(shape, dtype, device) for shape, dtype in hop)
    return edges


def _told(model: Any, message: tuple[Message, ...]) -> tuple[_Told, _Told]:
    shape, dtype = message[0].shape, message[0].dtype
    if hasattr(model, METHOD):
        takes, gives = getattr(model, METHOD)(shape, dtype)
        return _plain(takes), _plain(gives)
    config = model.config
    if getattr(config, 'enable_mhc_connections', False) and shape is not None:
        wide = shape[-1] != config.hidden_size  # a Megatron that tells it by itself
        contracted = model.decoder.has_final_layernorm_in_this_stage()
        streams = 1 if contracted or wide else config.mhc_num_residual_streams
        return None, (((*shape[:-1], shape[-1] * streams), dtype),)
    return None, _plain([(each.shape or (), each.dtype) for each in message])


def _plain(side: Sequence[tuple[Sequence[int], torch.dtype]] | None) -> _Told:
    return tuple((tuple(shape), dtype) for shape, dtype in side) if side else None


def _in_words(told: _Told) -> str:
    return ' and '.join(f'{shape} of {dtype}' for shape, dtype in told or ())


class HopWrapper(Wrapper):
    """Takes and gives tuples of tensors.

    Megatron's backward step goes back from one output: where there are several, autograd does from
    all of them at once, and what they hold stays until then.
    """

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        if not isinstance(forward.received, tuple):
            output, count = inner(forward)
        else:
            (output,), count = inner(forward._replace(received=[*forward.received]))
        return tuple(output) if isinstance(output, list) else output, count

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        received, output, gradient = cast(Any, backward[2:])
        if not isinstance(output, tuple) and not isinstance(received, tuple):
            return inner(backward)
        taken = received if isinstance(received, tuple) else (received,)
        taken = [each for each in taken if each is not None and each.requires_grad]
        if not isinstance(output, tuple):  # the loss, or the first of one tensor
            inner(backward._replace(received=cast(Any, taken)))
        else:
            made = [each for each in output if each.is_floating_point()]
            pairs = [(o, g) for o, g in zip(made, gradient, strict=True) if o.requires_grad]
            outputs, gradients_of = zip(*pairs, strict=True)
            with self.stage.delaying.queueing():
                torch.autograd.backward(outputs, gradients_of)
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in taken]
        if not isinstance(received, tuple):
            return gradients[0] if gradients else None
        return tuple(gradients)

    def release(self, output: Any, inner: Callable[[Any], None]) -> None:
        if not isinstance(output, tuple):
            inner(output)
