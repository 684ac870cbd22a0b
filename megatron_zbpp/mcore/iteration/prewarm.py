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
from megatron_zbpp.mcore.iteration.batch import Data, Executors
from megatron_zbpp.mcore.iteration.stages import Call
from megatron_zbpp.mcore.layers.linear import ADDED
from megatron_zbpp.mcore.model_settings import scales_late
from megatron_zbpp.mcore.side_effects import SideEffects
from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.runtime.channels import NoPeers
from megatron_zbpp.runtime.log import job_log, rank_log
from megatron_zbpp.runtime.tables import Tables, one_microbatch

_FIRST = 'is_first_microbatch'  # TE's modules add no gradients to what is there in that
_DONE = 'first iteration: the chunks of all ranks have run once, at the same time, in %.1f s'
PASSES = 'passes that run before the first iteration, to prepare it in parallel'
_CURE = '--no-pipeline-prewarm, or enable(prewarm=False)'
_FAILED = (
    f'{PASSES}, failed with {{error}}. If they work within an iteration, leave that out: {_CURE}'
)
_INTERRUPTED = f'{PASSES}; without them: {_CURE}'


def prewarmed(executors: Executors, call: Call, config: Any, data: Data) -> Data:
    """Run each chunk of this rank once; return what gives the same data again."""
    models = call.arguments.models
    why = _obstacle(executors, config)
    if why is None:
        held = [each.any() for model in models for p in model.parameters() for each in _grads(p)]
        if held and torch.stack(held).any():
            why = 'there are gradients already'  # which nobody could set back
    if why is not None:
        rank_log.info('the first iteration is not prepared in parallel: %s', why)
        return data
    again = _replayed(data)
    program = executors.context.lowered.programs[executors.pipeline.rank()]
    tables, nobody = Tables(one_microbatch(program), False), NoPeers(executors.pipeline)
    begun = time.perf_counter()
    try:
        with _nothing_left(models), torch.enable_grad():
            executor = executors.executor(replace(call, results=[]), again, tables, nobody)
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
    if alone := next(filter(None, (face.stays_alone for face in executors.faces)), None):
        return alone
    if executors.context.messages[0].shape is None:
        return 'shapes vary from microbatch to microbatch'
    if getattr(config, 'cuda_graph_impl', None) not in (None, 'none'):
        return 'CUDA graphs are captured in it'
    if getattr(config, 'fine_grained_activation_offloading', False):
        return "Megatron's offloading measures it"
    return None


def _replayed(data: Sequence[Iterator | None]) -> list[ReplayIterator | None]:
    """Return iterators that give data again; chunks that share an iterator share the new one."""
    made: dict[int, Any] = {
        id(each): each if isinstance(each, ReplayIterator) else ReplayIterator(each)
        for each in data
        if each is not None
    }
    for replay in made.values():
        replay.reserve(1)  # here, so that what drawing does to random states stays
        replay.mark(keep=True)
    return [made.get(id(iterator)) for iterator in data]


@contextmanager
def _nothing_left(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Leave gradients, random states, buffers, logged losses, flags and scales as they are."""
    parameters = [p for model in models for p in model.parameters()]
    modules: list[Any] = [module for model in models for module in model.modules()]
    before = [(p, p.grad is None, getattr(p, ADDED, None)) for p in parameters]
    first = [(module, module.is_first_microbatch) for module in modules if hasattr(module, _FIRST)]
    python, numpy = random.getstate(), np.random.get_state()
    late = scales_late(get_model_config(models[0]))
    scaled = [module for module in modules if late and hasattr(module, 'reset_fp8_meta_tensors')]
    scales = [module.get_fp8_meta_tensors() for module in scaled]
    try:
        with SideEffects([*models]).capture(), compat.another_rerun_machine():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
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
