"""Asynchronous schedules: passes with versions of the weights, and forwards of later batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model

from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.between_calls import BetweenCalls
from megatron_zbpp.mcore.iteration.arguments import Arguments, same
from megatron_zbpp.mcore.iteration.batch import NextIteration
from megatron_zbpp.mcore.iteration.seen_weights import require_seen
from megatron_zbpp.mcore.iteration.stages import ModelStage
from megatron_zbpp.mcore.left_behind import (
    emptied,
    random_states,
    same_states,
    set_random_states,
    show_losses,
)
from megatron_zbpp.mcore.lowered import Lowered
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.post_validation.watch import digest, summary
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.runtime.stage import MaybeTensor
from megatron_zbpp.runtime.versions import ByStage, Corrected, OneStorage, Slots, Versions
from megatron_zbpp.techniques.updates.graph import CORRECTED, STASHED
from megatron_zbpp.techniques.updates.versions import copies, updates_of

# an object, a number that tells of changes of it, and another one
_Mark = tuple[Any, float, torch.Tensor | None]

_LOOKED_AT = range(1, 11)  # forwards of a chunk behind which values are compared
_WARM_UP = 2  # of these, in which modules may set what stays as it is from then on
# what Megatron's layers write in each forward, and the next one alone reads
_OF_ONE_FORWARD = {'input_tensor', 'current_microbatch'}


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


class _Point(NamedTuple):
    """Where a forward in flight began."""

    random: tuple  # states
    given: dict[int, int]  # items of each replayed iterator since its mark


class ForwardsInFlight(NextIteration):
    """The forwards of later batches that a call runs, and what they have read and drawn.

    Between two calls the program finds random states as if they had not run. Where the next call
    is of another size or model, they are dropped, and what they have read is given again.
    """

    def __init__(self, session: Session) -> None:
        assert session.endless is not None, 'of an asynchronous schedule'
        self._session, self._endless = session, session.endless
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
        """Return what the chunks read instead of `iterator`, in training and evaluation alike."""
        if iterator is None:
            return None
        return self._replayed.setdefault(id(iterator), ReplayIterator(iterator))

    def take(self, arguments: Arguments) -> None:
        """Make the forwards in flight those of this call, or drop them.

        Raises:
            ValueError: a data iterator is another one, or evaluation reads that of training.
            NotImplementedError: the program has changed models since the call before.
        """
        latest = self._latest
        if arguments.forward_only:
            self._require_free(arguments)
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
            self._go_on()
        self._latest, self._runs = arguments, True
        used = {id(iterator) for iterator in arguments.iterators}
        self._replayed = {i: t for i, t in self._replayed.items() if i in used or not t.idle}

    def _require_free(self, arguments: Arguments) -> None:
        replays = (self._replayed.get(id(iterator)) for iterator in arguments.iterators)
        if any(each is not None and not each.idle for each in replays):
            raise ValueError(
                'the data iterator of an evaluation is that of training, of which forwards of the '
                "next batch have read: give it its own, or have all ranks call the plugin's "
                'drop_forwards() first'
            )

    def _go_on(self) -> None:
        if self._points and same_states(random_states(), self._first.random):
            set_random_states(*self._behind)
        begun = self._endless.begun_with_next_call
        self._points = {j: point for j, point in self._points.items() if j >= begun}
        for _, losses in (each for each in self._logged if each[0] < begun):
            show_losses(losses)
        self._logged = [each for each in self._logged if each[0] >= begun]
        for i, replay in self._replayed.items():
            if self._points:
                replay.forget_until(self._first.given.get(i, 0))
            else:
                replay.forget()

    @property
    def _first(self) -> _Point:
        return self._points[min(self._points)]

    @contextmanager
    def forward(self, p: Pass, model: torch.nn.Module) -> Iterator[None]:
        """Take note of what a forward of a later batch has; raise where it leaves more."""
        if id(model) not in self._unwritten:
            self._unwritten[id(model)] = Unwritten(model)
        with self._unwritten[id(model)].forward(), self._ahead(p):
            yield

    @contextmanager
    def _ahead(self, p: Pass) -> Iterator[None]:
        """Take note of random states, data and logged losses of a forward of a later batch."""
        if not self._endless.is_ahead(p):
            yield
            return
        if not self._points:
            for replay in self._replayed.values():
                replay.mark(keep=True)
        given = {i: replay.given for i, replay in self._replayed.items()}
        self._points[p.microbatch] = _Point(random_states(), given)
        shown = compat.logged_losses()
        with emptied(shown):
            yield
            self._logged.append((p.microbatch, dict(shown)))

    def stands(self) -> bool:
        """Return True: no passes are run again; those of a call have ended."""
        if self._runs and self._points:
            self._behind = random_states()
            set_random_states(*self._first.random)
        if self._runs and self._latest is not None and self._endless.versions is not None:
            self._between.begin(self._latest.models)
        self._runs = False
        return True

    def drop(self) -> None:
        """Drop what is in flight, on all ranks; what it has read is given again."""
        if not self._runs:  # else a call has failed, and no more messages come
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

    def possible(self) -> bool:
        """Return False: steps do not let forwards go ahead, calls do."""
        return False

    def run(self, ranks: int) -> None:
        """Run nothing."""

    def settle(self, clean: bool) -> None:
        """Drop what is in flight where the program says that its batch does not come."""
        if not clean:
            self.drop()


class VersionedStage(ModelStage):
    """One chunk of a Megatron model with several versions of its weights."""

    def __init__(self, versions: Versions, flight: ForwardsInFlight, *of_stage: Any) -> None:
        super().__init__(*of_stage)
        self._versions, self._flight = versions, flight

    def forward(self, p: Pass, received: MaybeTensor) -> torch.Tensor:
        self._versions.before_forward(p)
        with self._flight.forward(p, self.model):
            return super().forward(p, received)

    def backward(
        self, p: Pass, received: MaybeTensor, output: torch.Tensor, gradient: MaybeTensor
    ) -> MaybeTensor:
        self._versions.before_backward(p)
        return super().backward(p, received, output, gradient)


def make_versions(
    session: Session, lowered: Lowered, rank: int, models: list[torch.nn.Module]
) -> Versions:
    """Return the versions of the weights of this rank's stages, before the first call."""
    endless = session.endless
    assert endless is not None, 'of an asynchronous schedule'
    endless.at_end.callback(require_seen(models))
    for model in unwrap_model(models):
        hook = model.register_state_dict_pre_hook(lambda *_: endless.finish_step())
        endless.at_end.callback(hook.remove)
    stages = lowered.schedule.placement.stages(rank)
    made = [
        _versions_of(stage, session, lowered, rank, model)
        for stage, model in zip(stages, models, strict=True)
    ]
    size = sum(nbytes for _, nbytes in made) / 2**20
    job_log.info("copies of weights on the first rank, beside Megatron's: %.4g MiB", size)
    of_stage = {stage: versions for stage, (versions, _) in zip(stages, made, strict=True)}
    return of_stage[stages[0]] if len(stages) == 1 else ByStage(of_stage)


def _versions_of(
    stage: int, session: Session, lowered: Lowered, rank: int, model: torch.nn.Module
) -> tuple[Versions, int]:
    """Return the versions of the weights of a stage, and the bytes of their copies at most."""
    schedule, calls = lowered.schedule, lowered.calls
    endless, updates = session.endless, updates_of(schedule.graph)
    assert endless is not None and updates is not None, 'else there is one version'
    assert calls is not None, 'of an asynchronous schedule'
    parameters = [*model.parameters()]
    nbytes = sum(each.nbytes for each in parameters)
    # whether the optimizer writes to DDP's buffers, wherever parameters are pointed to
    ddp = getattr(model, 'ddp_config', None)
    buffered = bool(getattr(ddp, 'use_distributed_optimizer', False))
    ahead = calls.ahead(rank)
    if updates.backward == STASHED:
        delay = updates.delays[stage] if updates.delays else None
        ages = max(updates.delays, default=-(-calls.ahead(0) // updates.every))
        if delay == 0:  # all passes of a batch are between two steps
            return OneStorage(parameters, ages=ages), 0
        sizes = updates.every, delay, buffered, ahead
        slots = Slots(parameters, *sizes, endless.finish_step, ages, endless.loaded)
        return slots, nbytes * (copies(schedule)[stage] - 1 + buffered)
    if updates.backward != CORRECTED:
        return OneStorage(parameters), 0
    # of the distributed optimizer's main copies a rank has a part alone
    stepped = parameters if buffered else [getattr(p, 'main_param', p) for p in parameters]
    if not ahead:
        return OneStorage(parameters, stepped), 0
    decay = session.settings.correction_decay
    averages = sum(4 * each.numel() for each in parameters)
    corrected = Corrected(parameters, stepped, updates.every, ahead, decay, endless.loaded)
    return corrected, nbytes + averages


def _require_equal_rates(session: Session, lowered: Lowered, models: list[torch.nn.Module]) -> None:
    """Raise ValueError where copies of tied embeddings would be stepped at two rates (T1)."""
    updates, calls = updates_of(lowered.schedule.graph), lowered.calls
    assert updates is not None and calls is not None, 'of an asynchronous schedule'
    if updates.backward != CORRECTED or session.settings.anneal_steps == 0:
        return
    tied = getattr(unwrap_model(models[0]), 'share_embeddings_and_output_weights', False)
    if tied and calls.ahead(0) > updates.every:
        raise ValueError(
            'embeddings are tied, and pipemare would step their copies at the rates of their '
            'stages: give --untie-embeddings-and-output-weights, --pipeline-anneal-steps 0, or at '
            f'least {calls.ahead(0)} microbatches, from which on rates are alike'
        )


def maker(
    session: Session,
    flight: NextIteration,
    lowered: Lowered,
    models: list[torch.nn.Module],
    rank: int,
) -> Callable[..., ModelStage]:
    """Return what makes stages whose passes have the weights that they ask for.

    Raises:
        ValueError: copies of tied embeddings would be stepped at two rates.
    """
    endless, updates = session.endless, updates_of(lowered.schedule.graph)
    assert endless is not None and updates is not None, 'of an asynchronous schedule'
    assert isinstance(flight, ForwardsInFlight), 'as the plugin chooses'
    _require_equal_rates(session, lowered, models)
    make = functools.partial(make_versions, session, lowered, rank, models)
    return functools.partial(VersionedStage, endless.begin(updates, make), flight)
