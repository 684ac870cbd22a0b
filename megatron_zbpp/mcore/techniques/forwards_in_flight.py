"""Forwards of later batches that a call of an asynchronous schedule runs, and checks of models.

Refused are modules that do not see other versions of their weights, forwards that write state, and
programs that change a model between two calls.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat, side_effects
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.iteration.stages import Arguments, same
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.post_validation.watch import MODES, Watch, Watched, digest, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd
from megatron_zbpp.runtime.endless import EndlessTraining

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
    which a copy of the weights, or a captured graph, does not let them: NotImplementedError.

    Returns:
        What ends this: modules that have run no forward keep nothing of it.
    """
    waiting: dict[type, list[Any]] = defaultdict(list)  # hooks of classes that are to be asked
    hook = functools.partial(_after_forward, waiting)
    for module in {id(each): each for model in models for each in model.modules()}.values():
        if _trained(module):
            handle = module.register_forward_hook(hook, with_kwargs=True)
            waiting[type(module)].append(handle)

    def end() -> None:
        for handle in itertools.chain(*waiting.values()):
            handle.remove()
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
        with side_effects.SideEffects([module]).capture():
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
    return [each for each in module.parameters(recurse=False) if each.requires_grad]


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
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
        """Raise NotImplementedError for what a forward has written.

        Behind the first ones values are compared, too, which waits for the device.
        """
        self._forwards += 1
        look = self._forwards in _LOOKED_AT
        (tensors, counts), warm = self._marks(look), self._forwards > _WARM_UP
        yield
        tensors_now, counts_now = self._marks(look)
        names = [name for name, mark in tensors_now.items() if _differ(tensors.get(name), mark)]
        for name, mark in counts_now.items() if warm else ():
            if name in counts and _differ(counts[name], mark):
                names.append(name)
        if names:
            raise NotImplementedError(
                f'{summary(names)}, which a forward writes, is unsupported, because forwards of '
                'the next batch run before the optimizer step of this one, which would find what '
                'they have left: keep such state out of forwards, or take a synchronous schedule, '
                'such as zb-v'
            )

    def _marks(self, look: bool) -> tuple[dict[str, _Mark], dict[str, _Mark]]:
        """Return parameters and buffers, and other tensors, numbers and collections of modules."""
        tensors: dict[str, _Mark] = {}
        counts: dict[str, _Mark] = {}
        for path, module in self._modules:
            for buffers, own in enumerate((module._parameters, module._buffers)):
                for name, each in own.items():
                    if each is not None:
                        hashed = digest(each) if look and buffers else None
                        tensors[f'{path}.{name}'] = each, each._version, hashed
            for name, value in vars(module).items() if look else ():
                if name[0] == '_' or name in _OF_ONE_FORWARD:
                    continue
                if isinstance(value, torch.Tensor):
                    counts[f'{path}.{name}'] = value, value._version, None
                elif isinstance(value, list | dict | set):
                    counts[f'{path}.{name}'] = value, len(value), None
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    counts[f'{path}.{name}'] = None, value, None
        return tensors, counts


def _differ(before: _Mark | None, now: _Mark) -> bool:
    if before is None or before[0] is not now[0] or before[1] != now[1]:
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
        now_and_then = self._every and self._calls % self._every == 0
        self._hashed = self._calls <= side_effects.FIRST or bool(now_and_then)
        if self._hashed or new:
            self._watched = models, side_effects.watched_of(models, with_main=True)
        self._training = _training(models)
        self._note()

    def end(self, models: Sequence[torch.nn.Module]) -> None:
        """Raise NotImplementedError for what the program has changed of the same models."""
        if self._watched is None or self._watched[0] != models:
            self._watch = None
        else:
            self._compare(['train() or eval()'] if _training(models) != self._training else [])

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


class _Point(NamedTuple):
    """Where a forward in flight began."""

    random: tuple  # states
    given: dict[int, int]  # items of each replayed iterator since its mark


class ForwardsInFlight(NextIteration):
    """The forwards of later batches that a call runs, with their batches and random states.

    Between two calls the program finds random states as if no such forward had run. Where the next
    call is of another size or model, the forwards are dropped, and their batches are given again.
    """

    def __init__(self, session: Session, endless: EndlessTraining) -> None:
        self._session, self._endless = session, endless
        self._latest: Arguments | None = None  # whose forwards are in flight
        # by identity of their iterators, which they hold
        self._replayed: dict[int, ReplayIterator] = {}
        self._points: dict[int, _Point] = {}  # by microbatch in flight
        self._behind: tuple = ()  # random states behind those
        self._logged: list[tuple[int, dict[str, Any]]] = []  # by those microbatches, in order
        self._runs = False  # a call has begun and not ended
        self._between = BetweenCalls(session.settings.check_interval)
        self._endless.writing = self._between.step
        self._unwritten: dict[int, Unwritten] = {}  # by identity of chunks

    def replayed(self, iterator: Iterator | None) -> Iterator | None:
        if iterator is None:
            return None
        return self._replayed.setdefault(id(iterator), ReplayIterator(iterator))

    def take(self, arguments: Arguments) -> None:
        """Make the forwards in flight those of this call, or drop them."""
        latest = self._latest
        if arguments.forward_only:
            replays = (self._replayed.get(id(iterator)) for iterator in arguments.iterators)
            if any(each is not None and not each.idle for each in replays):
                raise ValueError(
                    'the data iterator of an evaluation is that of training, of which forwards of '
                    'the next batch have read: give it its own, or have all ranks call the '
                    "plugin's drop_forwards() first"
                )
            return
        self._between.end(arguments.models)
        if latest is not None and not same(latest.models, arguments.models):
            self.close()
        elif latest is not None and not latest.same_size(arguments):
            self.drop()
        elif latest is not None:
            if not same(latest.iterators, arguments.iterators):
                raise ValueError(
                    'the data iterator is not that of the call before, whose forwards have begun '
                    "this one: pass the same in every call, or have all ranks call the plugin's "
                    'drop_forwards() first'
                )
            states = side_effects.random_states()
            if self._points and side_effects.same_states(states, self._first.random):
                side_effects.set_random_states(*self._behind)
            begun = self._endless.begun_with_next_call
            self._points = {j: point for j, point in self._points.items() if j >= begun}
            for microbatch, losses in self._logged:
                if microbatch < begun:
                    side_effects.show_losses(losses)
            self._logged = [each for each in self._logged if each[0] >= begun]
            for i, replay in self._replayed.items():
                if self._points:
                    replay.forget_until(self._first.given.get(i, 0))
                else:
                    replay.forget()
        self._latest, self._runs = arguments, True
        used = {id(iterator) for iterator in arguments.iterators}
        self._replayed = {i: t for i, t in self._replayed.items() if i in used or not t.idle}

    @property
    def _first(self) -> _Point:
        return self._points[min(self._points)]

    @contextmanager
    def forward(self, p: Pass, model: torch.nn.Module) -> Iterator[None]:
        """Take note of what a forward of a later batch has; raise where it leaves more."""
        if id(model) not in self._unwritten:
            self._unwritten[id(model)] = Unwritten(model)
        with self._unwritten[id(model)].forward():
            if not self._endless.is_ahead(p):
                yield
                return
            if not self._points:
                for replay in self._replayed.values():
                    replay.mark(keep=True)
            given = {i: replay.given for i, replay in self._replayed.items()}
            self._points[p.microbatch] = _Point(side_effects.random_states(), given)
            shown = compat.logged_losses()
            with side_effects.emptied(shown):
                yield
                self._logged.append((p.microbatch, dict(shown)))

    def stands(self) -> bool:  # no passes are run again; those of a call have ended
        if self._runs and self._points:
            self._behind = side_effects.random_states()
            side_effects.set_random_states(*self._first.random)
        if self._runs and self._latest is not None and self._endless.versions is not None:
            self._between.begin(self._latest.models)
        self._runs = False
        return True

    def drop(self) -> None:
        """Drop the forwards in flight, on all ranks; their batches are given again."""
        # nothing is in flight before a call, and of one that has failed no more messages come
        if self._latest is not None and not self._runs:
            with self._session.watchdog.collective('messages of forwards that are dropped'):
                self._endless.drop()
        for replay in self._replayed.values():
            replay.rewind()
        self._latest = None
        self._points.clear()
        self._logged.clear()

    def close(self) -> None:
        """Drop what is in flight, and leave parameters as their optimizer knows them."""
        if self._runs:
            return
        self._endless.finish_step()
        self.drop()
        self._endless.close()
        self._unwritten.clear()

    def settle(self, clean: bool) -> None:
        if not clean:  # the program says that the batch in flight does not come
            self.drop()
