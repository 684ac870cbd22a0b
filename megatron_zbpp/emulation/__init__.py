"""Emulation of a GPU on a machine without one, and the flags that Megatron-LM needs there.

`cpu` for CUDA, NCCL and packages that Megatron imports for a GPU; `te` loads the kernels of
Transformer Engine, which are in a checkout only. The arithmetic is the real one, the speed is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

# Flags for a machine without a GPU; a user's own flags come later and so win.
_LOCAL = ('--transformer-impl=local', '--no-gradient-accumulation-fusion')
CPU_FLAGS = (
    '--transformer-impl=local',
    '--distributed-backend=gloo',
    '--no-gradient-accumulation-fusion',
    '--no-masked-softmax-fusion',
    '--no-bias-gelu-fusion',
    '--no-bias-swiglu-fusion',
    '--no-bias-dropout-fusion',
    '--no-persist-layer-norm',
    '--no-rope-fusion',
    # a forked data loader's worker has once hung before its first bytecode; the cause is not known
    '--num-workers=0',
)


def cpu_flags(words: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that a script with the flags `words` needs on a CPU."""
    emulated = wants_transformer_engine(words)
    return tuple(flag for flag in CPU_FLAGS if not (emulated and flag in _LOCAL))


def wants_transformer_engine(words: Sequence[str]) -> bool:
    """Return True if a script with the flags `words` asks for layers of Transformer Engine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--transformer-impl')
    known, _ = parser.parse_known_args(list(words))
    return known.transformer_impl == 'transformer_engine'
