"""Checks of models whose weights have several versions, and whose forwards run ahead of steps.

Refused are modules that do not see other versions of their weights, forwards that write state, and
programs that change a model between two calls.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_zbpp.mcore.side_effects import FIRST, SideEffects, watched_of
from megatron_zbpp.post_validation.watch import MODES, Watch, Watched, digest, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd

# an object, a number that tells of changes of it, and another one
_Mark = tuple[Any, float, torch.Tensor | None]

_LOOKED_AT = range(1, 11)  # forwards of a chunk behind which values are compared
_WARM_UP = 2  # of these, in which modules may set what stays as it is from then on
# what Megatron's layers write in each forward, and the next one alone reads
_OF_ONE_FORWARD = {'input_tensor', 'current_microbatch'}


def require_seen(models: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Have the first forward of each class of module that has trained weights run on others.

    Behind its own, it runs three times on the same input and random states: on its weights, on
    others elsewhere, and there on its own again, written in place. Outputs must differ each time,
    which a copy of the weights, or a captured graph, does not let them.

    Args:
        models: the chunks of this rank, before their first forward with versions.

    Returns:
        What ends this: modules that have run no forward keep nothing of it.

    The forward raises:
        NotImplementedError: a class does not see them.
    """
    waiting: dict[type, list[Any]] = defaultdict(list)  # hooks of classes that are to be asked
    for module in {id(each): each for model in models for each in model.modules()}.values():
        if _trained(module):
            hook = module.register_forward_hook(
                functools.partial(_after_forward, waiting), with_kwargs=True
            )
            waiting[type(module)].append(hook)

    def end() -> None:
        for hook in itertools.chain(*waiting.values()):
            hook.remove()
        waiting.clear()

    return end


def _after_forward(
    waiting: dict[type, list[Any]], module: torch.nn.Module, given: tuple, named: dict, _: Any
) -> None:
    kind = type(module)
    inputs = [each for each in _tensors((given, named)) if each.is_floating_point()]
    if not waiting[kind] or (inputs and not any(map(torch.any, inputs))):
        return  # of nothing but zeros any weights make the same, as of no tokens
    if not _sees(module, functools.partial(module.forward, *given, **named)):
        raise NotImplementedError(
            f'{kind.__module__}.{kind.__qualname__} does not see another version of its weights, '
            'as it computes with a copy or a captured graph: let its forward read its parameters, '
            'or take a synchronous schedule, such as zb-v'
        )
    for hook in waiting.pop(kind):
        hook.remove()


def _sees(module: torch.nn.Module, forward: Callable[[], Any]) -> bool:
    def run() -> list[torch.Tensor]:
        with SideEffects([module]).capture():
            return [each.detach() for each in _tensors(forward())]

    parameters = _trained(module)
    own = [each.data for each in parameters]
    outputs = [run()]
    try:
        for parameter in parameters:
            parameter.data = 1 - 2 * parameter.data
        outputs.append(run())
        with unseen_by_autograd(tuple(parameters)):
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data.copy_(data)
        outputs.append(run())
    finally:
        for parameter, data in zip(parameters, own, strict=True):
            parameter.data = data
    return not any(all(map(torch.equal, outputs[1], each)) for each in outputs[::2])


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    own = module.parameters(recurse=False)
    return [each for each in own if each.requires_grad]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, dict | tuple | list):
        for each in nested.values() if isinstance(nested, dict) else nested:
            yield from _tensors(each)


class Unwritten:
    """A chunk whose forwards leave parameters, buffers and counts as they are."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = [*model.named_modules()]
        self._forwards = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compare behind a forward; behind the first ones values, too, which wait for the device.

        Raises:
            NotImplementedError: names what the forward has written.
        """
        self._forwards += 1
        look = self._forwards in _LOOKED_AT
        tensors, counts = self._tensors(look), self._counts(look)
        yield
        names = [
            name
            for name, mark in self._tensors(look).items()
            if name not in tensors or _differ(tensors[name], mark)
        ]
        if self._forwards > _WARM_UP:
            now = self._counts(look).items()
            names += [each for each, mark in now if each in counts and _differ(counts[each], mark)]
        if names:
            raise NotImplementedError(
                f'{summary(names)}, which a forward writes, is unsupported, because forwards of '
                'the next batch run before the optimizer step of this one, which would find what '
                'they have left: keep such state out of forwards, or take a synchronous schedule, '
                'such as zb-v'
            )

    def _tensors(self, look: bool) -> dict[str, _Mark]:
        """Return parameters and buffers."""
        return {
            f'{path}.{name}': (each, each._version, digest(each) if look and buffers else None)
            for path, module in self._modules
            for buffers, own in enumerate((module._parameters, module._buffers))
            for name, each in own.items()
            if each is not None
        }

    def _counts(self, look: bool) -> dict[str, _Mark]:
        """Return other tensors, numbers and collections that modules have."""
        return {
            f'{path}.{name}': mark
            for path, module in (self._modules if look else ())
            for name, value in vars(module).items()
            if name[0] != '_' and name not in _OF_ONE_FORWARD and (mark := _mark(value)) is not None
        }


def _mark(value: object) -> _Mark | None:
    if isinstance(value, torch.Tensor):
        return value, value._version, None
    if isinstance(value, list | dict | set):
        return value, len(value), None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None, value, None
    return None


def _differ(before: _Mark, now: _Mark) -> bool:
    if before[0] is not now[0] or before[1] != now[1]:
        return True
    return before[2] is not None and now[2] is not None and not torch.equal(before[2], now[2])


class BetweenCalls:
    """Compares models before and behind the time in which the program has them."""

    def __init__(self, every: int) -> None:  # calls between two comparisons of values
        self._every, self._calls, self._hashed = every, 0, False
        self._watched: tuple[Sequence[torch.nn.Module], Watched] | None = None
        self._watch: Watch | None = None
        self._training: list[bool] = []

    def begin(self, models: Sequence[torch.nn.Module]) -> None:
        """Take note of `models`: a call has ended."""
        new = self._watched is None or self._watched[0] != models
        self._calls = 1 if new else self._calls + 1
        self._hashed = self._calls <= FIRST or bool(self._every and self._calls % self._every == 0)
        if self._hashed or new:
            self._watched = models, watched_of(models, with_main=True)
        self._training = _training(models)
        self._note()

    def end(self, models: Sequence[torch.nn.Module]) -> None:
        """Compare, where these are the same models: the next call begins.

        Raises:
            NotImplementedError: names what the program has changed.
        """
        if self._watched is None or self._watched[0] != models:
            self._watch = None
        else:
            modes = _training(models) != self._training
            self._compare(['train() or eval()'] if modes else [])

    def _compare(self, found: list[str]) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        # evaluations change modes and set them back, and end with other hooks of ours
        found += (name for name in watch.changes() if name != MODES)
        if (differ := watch.differ()) is not None and differ:
            found = [*dict.fromkeys([*found, *watch.different()])]
        if found:
            raise NotImplementedError(
                f'a change of {summary(found)} between two calls, outside of optimizer.step(), is '
                'unsupported, because an asynchronous schedule has older weights beside the newest '
                'and has run forwards of the next batch: leave weights to the optimizer, change '
                'what else there is before the first call, or take a synchronous schedule, such '
                'as zb-v'
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let a step write, between two calls or within one."""
        noted = self._watch is not None
        self._compare([])
        yield
        if noted:
            self._note()

    def _note(self) -> None:
        assert self._watched is not None, 'of a call that has ended'
        self._watch = Watch(self._watched[1], self._hashed, unseen_by_autograd)


def _training(models: Sequence[torch.nn.Module]) -> list[bool]:
    return [module.training for model in models for module in model.modules()]
