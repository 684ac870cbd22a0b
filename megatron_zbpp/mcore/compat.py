"""What differs between Megatron-Core releases, told by features and not by version strings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable


@functools.cache
def takes(function: Callable, parameter: str) -> bool:
    """Whether `function` has a parameter of that name."""
    return parameter in inspect.signature(function).parameters
