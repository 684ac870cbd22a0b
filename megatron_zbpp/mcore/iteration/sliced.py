"""A model chunk that runs its microbatches slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.mcore.iteration.arguments import Arguments
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.mcore.patches.slices import attends_in_slices, is_cut
from megatron_zbpp.mcore.slicing import Kept, Running, Slice
from megatron_zbpp.runtime.stage import MaybeTensor

_NO_CACHE = 'disable_parameter_transpose_cache'
_known: WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = WeakKeyDictionary()


def _caching_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of Transformer Engine in a chunk, looked for once."""
    if model not in _known:
        _known[model] = [module for module in model.modules() if hasattr(module, _NO_CACHE)]
    return _known[model]


class SlicedStage(ModelStage):
    """One chunk of a Megatron model, of which each pass runs a slice.

    The program's forward_step function is called for the first slice of a microbatch; for those
    behind it the model is called with what it gave.

    Args:
        cuts: first token of each slice, and behind them the tokens of a sequence.
        running: tells Megatron's layers which slice runs.
        of_stage: arguments of `ModelStage`.
    """

    def __init__(self, cuts: Sequence[int], running: Running, *of_stage: Any) -> None:
        super().__init__(*of_stage)
        self._cuts, self._running, self._kept = cuts, running, Kept()
        self.shared = self._kept.storages
        # by microbatch: arguments of the model and the loss function; losses of tokens so far
        self._called: dict[int, tuple[dict[str, Any], Any]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}

    def _by_megatron(
        self, p: Pass, received: MaybeTensor, data: Iterator | None, results: list[Any]
    ) -> Any:
        part = self._part(p)
        with self._runs(part):
            output, num_tokens = super()._by_megatron(p, received, data, [])
        if p.kind != F or not part.is_last:
            return output, num_tokens * 0
        if self._is_last:
            _, loss_func = self._called[p.microbatch]
            with torch.no_grad():
                results.append(loss_func(torch.cat(self._losses.pop(p.microbatch), 1))[-1])
        if self.call.arguments.forward_only:
            self._drop(p.microbatch)
        return output, num_tokens

    def _drop(self, microbatch: int) -> None:
        """Forget a microbatch, whose last pass has run."""
        self._kept.drop(microbatch)
        del self._called[microbatch]

    @contextmanager
    def _runs(self, part: Slice) -> Iterator[None]:
        """Run a slice within, without what Transformer Engine does for the first microbatch.

        Its backward would begin `main_grad` anew, behind those of the slices that follow it.
        """
        modules = _caching_modules(self.model)
        for module in modules:
            vars(module)[_NO_CACHE] = True  # Module's own setattr takes 20 times as long
        try:
            with self._running.slice(part, self._kept):
                yield
        finally:
            for module in modules:
                vars(module)[_NO_CACHE] = self.config.disable_parameter_transpose_cache

    def _part(self, p: Pass) -> Slice:
        start, end = self._cuts[p.slice : p.slice + 2]
        return Slice(p.microbatch, start, end, self._cuts[-1])

    def _step(self, p: Pass) -> Callable:
        part = self._part(p)

        def step(data: Iterator | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            if part.is_first:
                output, loss_func = self.call.arguments.forward_step_func(data, model)
                assert self._running.given is not None, 'the model was called'
                self._called[part.microbatch] = self._running.given, loss_func
            else:
                given, loss_func = self._called[part.microbatch]
                output = model(**given)
            return output, self._of_whole(p, part, loss_func) if self._is_last else loss_func

        return step

    def _of_whole(self, p: Pass, part: Slice, loss_func: Any) -> Any:
        """Return a loss function of a slice's tokens, by the program's own of whole sequences.

        To that, tokens of other slices have a loss of 0: so it divides by what it would divide by.
        """

        def of_slice(losses: torch.Tensor) -> Any:
            if p.kind == F:
                self._losses.setdefault(part.microbatch, []).append(losses.detach())
            missing = (part.start, part.total - part.end)
            return loss_func(torch.nn.functional.pad(losses, missing))

        return of_slice

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        part = self._part(p)
        with self._runs(part), _of_slice(part):
            made = super().backward(p, received, output, gradient)
        if part.is_first:
            self._drop(p.microbatch)
        return made


@contextmanager
def _of_slice(part: Slice) -> Iterator[None]:
    """Weigh auxiliary losses of experts, which are means of a slice's tokens, by its share."""
    whole = MoEAuxLossAutoScaler.main_loss_backward_scale
    if whole is not None:
        share = (part.end - part.start) / part.total
        MoEAuxLossAutoScaler.main_loss_backward_scale = whole * share
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = whole


def require(models: Iterable[torch.nn.Module], arguments: Arguments) -> None:
    """Raise for what cannot run slice by slice.

    Args:
        models: chunks of this rank that have not been looked at, unwrapped.
        arguments: of the call.

    Raises:
        NotImplementedError: names what, and the cure.
    """
    cure = 'take a schedule of whole sequences'
    if arguments.collect_non_loss_data:
        raise NotImplementedError(
            f'collect_non_loss_data: a slice has no such data of its own: {cure} for it'
        )
    for model in models:
        if not is_cut(model):
            raise NotImplementedError(
                f'slices of sequences: inputs of a {type(model).__name__} cannot be cut, as those '
                f'of a GPTModel can: {cure}'
            )
        for layer in model.modules():
            attention = getattr(layer, 'core_attention', None)
            if attention is not None and not attends_in_slices(attention):
                raise NotImplementedError(
                    f'slices of sequences: {type(attention).__name__} is not known to attend to '
                    f'the slices before: {cure}'
                )
