"""Seeds of dropout for each layer and microbatch, so that all schedules draw the same masks.

A rank of Megatron's draws masks in the order of its passes. Here each layer of each microbatch
begins with random states that follow from what the trackers of the first pipeline rank were seeded
with, the step, the microbatch, the slice and the layer. Ranks of tensor and expert parallelism
differ where stock Megatron's do. A forward that runs again draws the same.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron_zbpp.guests.base import Around, Guest, Run
from megatron_zbpp.ir import Pass
from megatron_zbpp.mcore.side_effects import random_states, set_random_states
from megatron_zbpp.runtime.compat import another_client, default_store
from megatron_zbpp.runtime.measure import Iteration

_DEFAULT, _AS_DEFAULT, _MODEL_PARALLEL = 'default', 'data-parallel-rng', 'model-parallel-rng'
_LAYER = re.compile(r'(.*\blayers)\.\d+')
# seeds of a replica; step, microbatch, slice, evaluation
_Place = tuple[Mapping[str, int], tuple[int, ...]]
# how many sessions have exchanged seeds: as long as its group lives, the same on all its ranks
_exchanged: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class DropoutSeeds(Guest):
    """Seeds the layers of this rank while passes run."""

    def __init__(self) -> None:
        self._step = self._first = 0
        self._evaluations = 0  # since the latest step
        self._place: _Place | None = None  # of the pass that runs
        self._inside = False  # of a model's forward
        self._seen: set[str] = set()  # what has run in it
        self._before: tuple | None = None  # random states, while seeded ones are set
        self._hooked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._seeds: dict[dist.ProcessGroup, list[Mapping[str, int]]] = {}
        self._generator: torch.Generator | None = None
        self._collective: Callable[[str], AbstractContextManager[None]]

    def fingerprint(self) -> Mapping[str, object]:
        return {'dropout seeds': True, 'step resumed at': self._first}

    def join(self, run: Run) -> None:
        self._collective = run.collective

    def resume(self, step: int) -> None:
        self._step = self._first = step

    def before(self, step: int | None) -> None:
        self._step = self._step if step is None else step

    def after(self, iteration: Iteration, run: Run) -> None:
        """Take note that a step has ended: forwards that run ahead are of the next one."""
        self._step, self._evaluations = self._step + 1, 0

    def within(self, named: Around, call: Any, pp_group: dist.ProcessGroup) -> Around:
        """Return the context of a pass: `named`, and within it the place that seeds depend on."""
        # models that a program does not set to eval() drop in an evaluation, too
        self._evaluations += call.arguments.forward_only
        self._generator = torch.Generator(call.device)
        for model in unwrap_model(call.arguments.models):
            if model not in self._hooked:
                self._hooked.add(model)
                self._hook(model)
        if pp_group not in self._seeds:
            self._seeds[pp_group] = self._exchange(pp_group, call.num_routes)
        evaluation = self._evaluations if call.arguments.forward_only else 0
        return functools.partial(self._pass, named, call, self._seeds[pp_group], evaluation)

    @contextmanager
    def _pass(
        self, named: Around, call: Any, seeds: list[Mapping[str, int]], evaluation: int, p: Pass
    ) -> Iterator[None]:
        """Run a pass within; after an error random states are set back behind it."""
        place = self._step, call.microbatch(p), p.slice, evaluation
        self._place = seeds[p.microbatch % len(seeds)], place
        self._seen, self._inside = set(), False
        try:
            with named(p):
                yield
        finally:
            self._place = None
            self._set_back()

    def _hook(self, model: torch.nn.Module) -> None:
        """Seed a chunk where its forward begins, and each of its numbered layers."""
        divided = get_model_config(model).sequence_parallel
        model.register_forward_pre_hook(functools.partial(self._enter, 'model', False))
        model.register_forward_hook(functools.partial(self._leave, True))
        for name, module in model.named_modules():
            found, number = _LAYER.fullmatch(name), getattr(module, 'layer_number', None)
            if found and isinstance(number, int):
                enter = functools.partial(self._enter, f'{found[1]} {number}', divided)
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(functools.partial(self._leave, False))

    def _enter(self, name: str, divided: bool, module: torch.nn.Module, _: Any) -> None:
        if self._place is None:
            return  # no pass
        self._inside = self._inside or name == 'model'
        if self._inside and name in self._seen:
            raise NotImplementedError(
                f'{type(module).__name__} ({name}) runs twice in a forward, and would draw the '
                'same masks: leave out --pipeline-dropout-seeds, or dropout_seeds'
            )
        self._seen.add(name)
        if self._before is None:
            self._before = random_states()
        host, _, tracked = self._before
        seeds, place = self._place
        default = _MODEL_PARALLEL if divided and _MODEL_PARALLEL in tracked else _DEFAULT
        made = {each: self._state(seeds[each], *place, name) for each in (default, *tracked)}
        set_random_states(host, made[default], {each: made[each] for each in tracked})

    def _leave(self, whole: bool, *_: Any) -> None:
        """Set random states back behind a model, or a layer that runs again within a backward."""
        self._inside = self._inside and not whole
        if not self._inside:
            self._set_back()

    def _set_back(self) -> None:
        if self._before is not None:
            set_random_states(*self._before)
            self._before = None

    def _state(self, *of: object) -> torch.Tensor:
        assert self._generator is not None, 'a call has begun'
        found = hashlib.blake2b(repr(of).encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(found, 'big') >> 1).get_state()

    def _exchange(self, pp_group: dist.ProcessGroup, num_routes: int) -> list[Mapping[str, int]]:
        """Return the seeds of the first pipeline rank of each replica, by name of their states."""
        ranks = '-'.join(map(str, dist.get_process_group_ranks(pp_group)))
        number = _exchanged[pp_group] = _exchanged.get(pp_group, 0) + 1
        key = f'megatron_zbpp dropout seeds {ranks} {pp_group.group_name} {number}'
        store: Any = another_client(default_store())
        rank = pp_group.rank()
        if rank < num_routes:  # pipeline rank by pipeline rank
            _, default, tracked = random_states()
            assert self._generator is not None, 'a call has begun'
            seeds = {}
            for name, state in {**tracked, _DEFAULT: tracked.get(_AS_DEFAULT, default)}.items():
                self._generator.set_state(state)
                seeds[name] = self._generator.initial_seed()
            store.set(f'{key} {rank}', pickle.dumps(seeds))
        with self._collective('seeds of dropout of the first pipeline rank'):
            return [pickle.loads(store.get(f'{key} {each}')) for each in range(num_routes)]
