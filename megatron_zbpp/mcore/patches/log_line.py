"""The pipeline's figures in the log line of NVIDIA's training loop, and where its scalars go.

    ... | number of nan iterations:   0 | idle GPU time: 4.0% | pipeline bubble: 3.1% | live ...

All ranks come to the line, and the last one prints it. There, where Megatron gathers its timers
from all ranks, too, the figures of all iterations since the last line are gathered from the ranks
of a pipeline; as Megatron's own, they are means. Between lines no rank waits for them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from types import ModuleType

from megatron_zbpp.mcore.session import Session
from megatron_zbpp.runtime.observe.measure import Figures

_TRAINING = 'megatron.training.training'
_LINE = re.compile(r' \[.*?\] iteration +(\d+)/.*\|$')
_SCALARS = {
    'pipeline/bubble': 'bubble',
    'pipeline/idle-all-ranks': 'idle',
    'pipeline/live-activations': 'live',
}
_EARLY = {'pipeline/early-steps': 'early_steps', 'pipeline/steps-taken-back': 'taken_back'}


def wrapped(session: Session, original: Callable) -> Callable:
    """Return the replacement of `print_rank_last`."""

    @functools.wraps(original)
    def print_rank_last(message: str) -> None:
        line = _LINE.match(str(message))
        figures = None if line is None else session.figures()
        if line is None or figures is None:
            original(message)
            return
        original(f'{message} {figures}')
        _write(sys.modules[_TRAINING], figures, int(line[1]))

    return print_rank_last


def _write(module: ModuleType, figures: Figures, iteration: int) -> None:
    """Write to TensorBoard and Weights & Biases, where the rank has them, as Megatron does."""
    writer, wandb = module.get_tensorboard_writer(), module.get_wandb_writer()
    if not writer or iteration % module.get_args().tensorboard_log_interval:
        return
    early = {} if figures.early_steps is None else _EARLY
    for name, attribute in (_SCALARS | early).items():
        value = getattr(figures, attribute)
        writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)
