"""The calls that a thread is in, in words."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback

import torch
import torch.distributed as dist

_FRAMES = 4
_FOLDERS = {
    'torch.distributed': os.path.dirname(dist.__file__),
    'torch': os.path.dirname(torch.__file__),
    'Python': sysconfig.get_path('stdlib'),
}
# functions that only call another one, as they are mostly named
_DECORATING = ('wrapper', 'handle_torch_function', '__torch_function__')


def calls_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the calls that a thread is in, innermost first, without those that only decorate."""
    calls = reversed(traceback.extract_stack(sys._current_frames()[thread]))
    return [call for call in calls if call.name not in _DECORATING]


def is_distributed(call: traceback.FrameSummary) -> bool:
    return call.filename.startswith(_FOLDERS['torch.distributed'])


def is_library(call: traceback.FrameSummary) -> bool:
    """Return whether it is of Python or torch, which say little about what is being done."""
    installed = any(name in call.filename for name in ('site-packages', 'dist-packages'))
    name = 'torch' if installed else 'Python'
    return call.filename.startswith(_FOLDERS[name])


def words(call: traceback.FrameSummary) -> str:
    return f'{call.name} ({call.filename}:{call.lineno})'


def stack_of(thread: int) -> str:
    """Return the innermost calls of a thread, on one line."""
    return f'in: {" < ".join(map(words, calls_of(thread)[:_FRAMES]))}'
