"""The first iteration in parallel: before it, each rank runs its chunks once by itself.

At first use kernels are compiled and tuned, communicators made, and memory is taken; in a pipeline
the ranks come to that one after the other. Here all do it at once. What runs is the first
microbatch of the schedule's own passes; of what it does, nothing is left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.utils import get_model_config

from megatron_zbpp.mcore import compat
from megatron_zbpp.mcore.iteration.executors import Data, Executors
from megatron_zbpp.mcore.iteration.stages import Call
from megatron_zbpp.mcore.layers.dummy_gradients import ADDED
from megatron_zbpp.mcore.model_settings import captured, scales_late
from megatron_zbpp.mcore.side_effects import SideEffects
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.runtime.alone import NoPeers, one_microbatch
from megatron_zbpp.runtime.log import job_log, rank_log
from megatron_zbpp.runtime.tables import Tables

_FIRST = 'is_first_microbatch'  # TE's modules add no gradients to what is there in that
_LEFT_OUT = 'the first iteration is not prepared in parallel: %s'
_DONE = 'first iteration: the chunks of all ranks have run once, at the same time, in %.1f s'
PASSES = 'passes that run before the first iteration, to prepare it in parallel'
_CURE = '--no-pipeline-prewarm, or enable(prewarm=False)'
_FAILED = (
    f'{PASSES}, failed with {{error}}. If they work within an iteration, leave that out: {_CURE}'
)
_INTERRUPTED = f'{PASSES}; without them: {_CURE}'


def prewarmed(executors: Executors, call: Call, config: Any, data: Data) -> Data:
    """Run each chunk of this rank once; return what gives the same data again.

    Raises:
        RuntimeError: a pass failed; with the cure.
        KeyboardInterrupt: one was interrupted; says so.
    """
    models = call.arguments.models
    why = _obstacle(executors, config) or _held(models)
    if why is not None:
        rank_log.info(_LEFT_OUT, why)
        return data
    again = _replayed(data)
    tables = Tables(one_microbatch(executors.lowered.programs[executors.pipeline.rank()]), False)
    nobody = NoPeers(executors.pipeline)
    begun = time.perf_counter()
    try:
        with _nothing_left(models), torch.enable_grad():
            executor = executors.alone(replace(call, results=[]), again, tables, nobody)
            with executors.session.watchdog.passes(executor, part_of=_INTERRUPTED):
                executor.run()
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(_INTERRUPTED) from error
    except Exception as error:
        raise RuntimeError(_FAILED.format(error=f'{type(error).__name__}: {error}')) from error
    for each in {id(replay): replay for replay in again if replay is not None}.values():
        each.rewind()
    job_log.info(_DONE, time.perf_counter() - begun)
    return again


def _obstacle(executors: Executors, config: Any) -> str | None:
    for why in (face.stays_alone for face in executors.faces):
        if why is not None:
            return why
    if executors.messages[0].shape is None:
        return 'shapes vary from microbatch to microbatch'
    if captured(config) is not None:
        return 'CUDA graphs are captured in it'
    if getattr(config, 'fine_grained_activation_offloading', False):
        return "Megatron's offloading measures it"
    return None


def _held(models: Sequence[torch.nn.Module]) -> str | None:
    """Return that there are gradients, which nobody could set back; None: there are none."""
    held = [each.any() for model in models for p in model.parameters() for each in _grads(p)]
    return 'there are gradients already' if held and torch.stack(held).any() else None


def _replayed(data: Sequence[Iterator | None]) -> list[ReplayIterator | None]:
    """Return iterators that give data again; chunks that share an iterator share the new one.

    The first item is drawn here, so that what drawing does to random states stays.
    """
    made: dict[int, ReplayIterator] = {}
    for iterator in data:
        if iterator is None:
            continue
        if id(iterator) not in made:
            known = isinstance(iterator, ReplayIterator)
            made[id(iterator)] = iterator if known else ReplayIterator(iterator)
    for replay in made.values():
        replay.reserve(1)
        replay.mark(keep=True)
    return [None if iterator is None else made[id(iterator)] for iterator in data]


@contextmanager
def _nothing_left(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Leave gradients, random states, buffers, logged losses, flags and scales as they are."""
    parameters = [p for model in models for p in model.parameters()]
    modules: list[Any] = [module for model in models for module in model.modules()]
    before = [(p, p.grad is None, getattr(p, ADDED, None)) for p in parameters]
    first = [(module, module.is_first_microbatch) for module in modules if hasattr(module, _FIRST)]
    states = random.getstate(), np.random.get_state()
    late = scales_late(get_model_config(models[0]))
    scaled = [module for module in modules if late and hasattr(module, 'reset_fp8_meta_tensors')]
    scales = [module.get_fp8_meta_tensors() for module in scaled]
    try:
        with SideEffects([*models]).capture(), compat.another_rerun_machine():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for parameter, had_none, added in before:
            if had_none:
                parameter.grad = None
            for gradient in _grads(parameter):
                gradient.zero_()
            if added is not None:
                setattr(parameter, ADDED, added)
        for module, is_first in first:
            module.is_first_microbatch = is_first
        for module, values in zip(scaled, scales, strict=True):
            module.reset_fp8_meta_tensors(values)


def _grads(parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    places = parameter.grad, getattr(parameter, 'main_grad', None)
    return [each for each in places if isinstance(each, torch.Tensor)]
