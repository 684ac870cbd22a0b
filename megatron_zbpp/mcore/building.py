"""The chunk of this rank that is being built, for functions that Megatron does not pass it to.

NVIDIA's builders call some of their specification functions without `vp_stage`; those then ask
for the layers of no chunk, which Megatron refuses by an assertion where there are several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_block import TransformerBlock

_chunks: list[int] = []


def chunk_being_built() -> int | None:
    """Return the index among this rank's chunks of the one that is being built; None: none is."""
    return _chunks[-1] if _chunks else None


@contextmanager
def building(chunk: int) -> Iterator[None]:
    """Let functions ask for `chunk` meanwhile."""
    _chunks.append(chunk)
    try:
        yield
    finally:
        _chunks.pop()


def of_one_chunk(build: Callable) -> Callable:
    """Wrap a model provider, or a builder's function, that is called for each chunk of a rank.

    The wrapped function raises NotImplementedError where the model ignores which chunk it is.
    """

    @functools.wraps(build)
    def build_chunk(*args: Any, **kwargs: Any) -> Any:
        chunk = kwargs.get('vp_stage')
        if chunk is None:
            return build(*args, **kwargs)
        with building(chunk):
            model = build(*args, **kwargs)
        _require_chunk(model, chunk, name_of(build))
        return model

    return build_chunk


def name_of(build: Callable) -> str:
    """Return the name of a provider, through partial functions."""
    while isinstance(build, functools.partial):
        build = build.func
    return getattr(build, '__qualname__', type(build).__name__)


def _require_chunk(model: torch.nn.Module, chunk: int, builder: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, 'config', None)
        if not isinstance(module, TransformerBlock | LanguageModule):
            continue
        if config.pipeline_model_parallel_size > 1 and getattr(module, 'vp_stage', chunk) != chunk:
            raise NotImplementedError(
                f'{builder} does not pass vp_stage={chunk} to the {type(model).__name__} that it '
                'builds, so that its layers take themselves for those of another chunk: pass it, '
                'or take a schedule with one chunk a rank, such as zb-h1'
            )
