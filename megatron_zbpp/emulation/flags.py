"""The flags that a script of Megatron-LM needs on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

# What a machine without a GPU needs; whatever the user gives comes later and so wins.
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
    """Return whether a script with the flags `words` asks for the layers of Transformer Engine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--transformer-impl')
    known, _ = parser.parse_known_args(list(words))
    return known.transformer_impl == 'transformer_engine'
