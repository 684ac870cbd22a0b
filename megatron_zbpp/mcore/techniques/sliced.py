"""Slices of sequences in training: each pass of a stage runs a slice."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import F, Pass
from megatron_zbpp.mcore import compat, side_effects
from megatron_zbpp.mcore.faces import CallContext, Face, Wrap
from megatron_zbpp.mcore.iteration.stages import Arguments, ModelStage
from megatron_zbpp.mcore.patches.registry import Patch, replaced
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import BY_FLAG
from megatron_zbpp.mcore.techniques import sliced_layers
from megatron_zbpp.mcore.techniques.sliced_layers import WHOLE, Kept, Running, Slice
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.stage import Backward, ForwardStep, ProgramOutput, StepOutput, Wrapper

_NO_CACHE = 'disable_parameter_transpose_cache'
# of chunks: their modules of Transformer Engine
_known: WeakKeyDictionary[torch.nn.Module, list[torch.nn.Module]] = WeakKeyDictionary()


class SliceWrapper(Wrapper):
    """Runs a slice in each pass of a stage.

    The program's forward_step function is called for the first slice of a microbatch; for those
    behind it the model is called with what it gave. `cuts` are the first token of each slice, and
    behind them the tokens of a sequence.
    """

    asks_gradients = True

    def __init__(self, cuts: Sequence[int], running: Running, stage: ModelStage) -> None:
        super().__init__(stage)
        self._cuts, self._running, self._kept = cuts, running, Kept()
        self.shared = self._kept.storages
        # by microbatch: a call of the model, and the loss function; losses of tokens so far
        self._called: dict[int, tuple[Callable[[], Any], Any]] = {}
        self._losses: dict[int, list[torch.Tensor]] = {}
        self._inner: Any = unwrap_model(stage.model)

    def step(self, forward: ForwardStep, inner: Callable[[ForwardStep], StepOutput]) -> StepOutput:
        p, part = forward.p, self._part(forward.p)
        with self._runs(part):
            output, num_tokens = inner(forward._replace(results=[]))
        if p.kind != F or not part.is_last:
            return output, num_tokens * 0
        if self.stage.is_last:
            _, loss_func = self._called[p.microbatch]
            losses = torch.cat(self._losses.pop(p.microbatch), 1)
            if not self.stage.call.arguments.forward_only:
                self._require_sum(losses, loss_func)
            with torch.no_grad():
                forward.results.append(loss_func(losses)[-1])
        if self.stage.call.arguments.forward_only:
            self._drop(p.microbatch)
        return output, num_tokens

    def _drop(self, microbatch: int) -> None:
        self._kept.drop(microbatch)
        del self._called[microbatch]

    @contextmanager
    def _runs(self, part: Slice) -> Iterator[None]:
        """Run a slice; Transformer Engine must not begin `main_grad` anew in its backward."""
        modules = _known.get(model := self.stage.model)
        if modules is None:
            modules = _known[model] = [each for each in model.modules() if hasattr(each, _NO_CACHE)]
        for module in modules:
            vars(module)[_NO_CACHE] = True  # Module's own setattr takes 20 times as long
        try:
            with self._running.slice(part, self._kept, self._inner), self._logged(part):
                yield
        finally:
            for module in modules:
                vars(module)[_NO_CACHE] = self.stage.config.disable_parameter_transpose_cache

    def _part(self, p: Pass) -> Slice:
        start, end = self._cuts[p.slice : p.slice + 2]
        return Slice(p.microbatch, start, end, self._cuts[-1])

    def call(
        self, p: Pass, data: Iterator | None, model: Any, inner: Callable[..., ProgramOutput]
    ) -> ProgramOutput:
        part = self._part(p)
        if part.is_first:
            output, call, loss_func = self._first(functools.partial(inner, p, data, model), model)
            self._called[part.microbatch] = call, loss_func
        else:
            call, loss_func = self._called[part.microbatch]
            output = call()
        if not self.stage.is_last:
            return ProgramOutput(output, loss_func, loss_func)

        def of_slice(losses: torch.Tensor) -> Any:
            """Return the program's loss, to which tokens of other slices have a loss of 0."""
            if p.kind == F:
                self._losses.setdefault(part.microbatch, []).append(losses.detach())
            return loss_func(_padded(losses, part))

        return ProgramOutput(output, of_slice, loss_func)

    def _first(
        self, program: Callable[[], ProgramOutput], model: torch.nn.Module
    ) -> tuple[Any, Callable, Any]:
        calls: list[Callable] = []
        made: list[tuple[Any, int]] = []
        before = model.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(functools.partial(model, *args, **kwargs)),
            prepend=True,
            with_kwargs=True,
        )
        behind = model.register_forward_hook(lambda _, args, got: made.append((got, _version(got))))
        with before, behind:  # removed at its end
            output, _, loss_func = program()
        if not made or output is not made[-1][0] or _version(output) != made[-1][1]:
            raise NotImplementedError(
                'slices of sequences: forward_step is called for the first one alone, so that what '
                'it does with the output is not done for the others: let forward_step call the '
                'model that it is given and return what that gives, unchanged (the loss function '
                f'may change it), or {WHOLE}'
            )
        return output, calls[-1], loss_func

    def _require_sum(self, losses: torch.Tensor, loss_func: Any) -> None:
        """Raise unless each token has by its slice the gradient that it has by the sequence."""
        function = getattr(loss_func, 'func', loss_func)
        code = getattr(function, '__code__', type(function))
        if code in self._running.additive:
            return
        total = self._cuts[-1]
        spans = [(0, total), *itertools.pairwise(self._cuts)]
        with torch.enable_grad(), compat.another_rerun_machine():
            (whole, *gradients), (counts, *others) = zip(
                *(_gradient(losses, loss_func, Slice(0, *span, total)) for span in spans),
                strict=True,
            )
            with side_effects.put_back():
                depends = loss_func(losses)[0].requires_grad
        rounding = 16 * torch.finfo(whole.dtype).eps * whole.abs().max().item()
        near = {'rtol': 0, 'atol': rounding, 'equal_nan': True}
        alike = torch.allclose(torch.cat(gradients, 1), whole, **near)
        if depends or not alike or any(count != counts for count in others):
            raise NotImplementedError(
                'slices of sequences: the loss function is no sum over tokens: gradients or counts '
                'of a slice are not those of its tokens in the whole sequence, or it has a term '
                'that trains by itself: let it weigh losses of tokens by what does not depend on '
                f'other tokens, or {WHOLE}'
            )
        if whole.any():  # else all was masked, and nothing has counted
            self._running.additive.add(code)

    @contextmanager
    def _logged(self, part: Slice) -> Iterator[None]:
        """Weigh losses of routers in the log, which are means of a slice's tokens, by its share."""
        experts = getattr(self.stage.config, 'num_moe_experts', None)
        entries = compat.logged_losses() if experts else {}
        before: dict[str, torch.Tensor] = {}
        for name, entry in entries.items():
            values = compat.logged_values(entry)
            before[name] = values.clone()
            values.zero_()
        try:
            yield
        finally:
            for name, entry in entries.items():
                compat.logged_values(entry).mul_(part.share).add_(before.get(name, 0))

    def backward(self, backward: Backward, inner: Callable[[Backward], Any]) -> Any:
        part, by_token = self._part(backward.p), self.stage.config.calculate_per_token_loss
        with self._runs(part), _of_slice(part, by_token):
            made = inner(backward)
        if part.is_first:
            self._drop(backward.p.microbatch)
        return made


def _version(output: Any) -> int:
    counted = isinstance(output, torch.Tensor) and not output.is_inference()
    return output._version if counted else 0  # torch's count of writes


def _padded(losses: torch.Tensor, part: Slice) -> torch.Tensor:
    """Return outputs of a slice, (micro batch, tokens, ...), with zeros for the other tokens."""
    if losses.dim() < 2 or losses.size(1) != part.end - part.start:
        raise NotImplementedError(
            f'slices of sequences: the model gives a tensor of shape {tuple(losses.shape)} for '
            f'{part.end - part.start} tokens, which are to be its axis 1: let it give losses or '
            f'logits, (micro batch, tokens, ...), or {WHOLE}'
        )
    missing = (part.start, part.total - part.end)
    return torch.nn.functional.pad(losses, (0, 0) * (losses.dim() - 2) + missing)


def _gradient(losses: torch.Tensor, loss_func: Any, part: Slice) -> tuple[torch.Tensor, list]:
    own = losses[:, part.start : part.end].clone().requires_grad_()
    with side_effects.put_back():
        loss, *counts, _ = loss_func(_padded(own, part))
    gradient = torch.zeros_like(own)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True)
    return gradient, list(map(int, counts))


def _of_slice(part: Slice, by_token: bool) -> AbstractContextManager[None]:
    """Weigh losses of experts, means of tokens, by a slice's share; Megatron does `by_token`."""
    whole = MoEAuxLossAutoScaler.main_loss_backward_scale
    scale = whole if whole is None or by_token else whole * part.share
    return replaced(MoEAuxLossAutoScaler, 'main_loss_backward_scale', scale)


def require(arguments: Arguments) -> None:
    """Raise NotImplementedError for a call that cannot run slice by slice."""
    if arguments.collect_non_loss_data:
        raise NotImplementedError(
            f'collect_non_loss_data: a slice has no such data of its own: {WHOLE} for it'
        )


class Sliced(Face):
    """Sequences run slice by slice."""

    nest = 20  # it changes the loss function, which the output layer takes from it
    no_hops = 'leave out --pipeline-slices'

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.running, self._cuts = Running(), ()

    def patches(self) -> Iterator[Patch]:
        return sliced_layers.patches(self.running)

    def require(self, chunk: torch.nn.Module) -> None:
        if self.session.programs.num_slices > 1:
            sliced_layers.require(chunk)

    def notes(self, config: Any) -> Iterator[str]:
        if self.session.programs.num_slices > 1 and getattr(config, 'num_moe_experts', None):
            yield (
                'auxiliary losses of experts are those of each slice, weighed by its tokens: not '
                'quite those of whole sequences'
            )

    def settle(self, arguments: Arguments, config: Any, num_ranks: int) -> None:
        programs = self.session.programs
        if not programs.to_find_slices:
            return
        from megatron_zbpp.mcore.techniques.slice_choice import settled

        model = SimpleNamespace(**vars(config), seq_length=arguments.seq_length)
        counts = [arguments.num_microbatches]
        settings, found = settled(self.session.settings, model, num_ranks, counts)
        assert settings.sliced is not None
        programs.slice_by(settings.sliced)
        job_log.info(BY_FLAG.fill(found))

    def lengths(self, arguments: Arguments, config: Any) -> tuple[int, ...]:
        self._cuts = self.session.programs.cuts(config, arguments.seq_length)
        return tuple(end - start for start, end in itertools.pairwise(self._cuts))

    def fingerprint(self) -> Mapping[str, object]:
        return {'first tokens of slices': self._cuts} if len(self._cuts) > 2 else {}

    def begin(self, context: CallContext) -> Wrap | None:
        if len(self._cuts) <= 2:
            return None  # of slices that were to be found, there is one
        require(context.arguments)
        return functools.partial(SliceWrapper, self._cuts, self.running)
