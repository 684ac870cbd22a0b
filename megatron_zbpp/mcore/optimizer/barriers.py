"""Settings that make pipeline ranks wait for each other although optimizer steps do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_zbpp.ir import Placement

# argument: what waits in each iteration where it is set, and what to do
_EACH_ITERATION = {
    'exit_duration_in_mins': ('ranks agree on the time', 'leave the end to the job scheduler'),
    'exit_signal_handler': ('ranks tell each other of signals', 'save often instead'),
    'log_params_norm': ('the norm is summed over all ranks', 'drop --log-params-norm'),
    'calculate_per_token_loss': (
        'the last stage tells all others how many tokens it counted',
        'average by microbatch',
    ),
    'num_experts': ('logged losses of routers are summed over all ranks', 'none so far'),
    'async_save': ('ranks ask each other whether a save has ended', 'none while one runs'),
}


WAIT = 'optimizer steps wait for all ranks: %s'


def barriers(args: Any, placement: Placement) -> Iterator[str]:
    """Return the barriers between steps, each in words, with the cure.

    Args:
        args: Megatron's arguments.
        placement: of the stages.
    """
    for name, (what, cure) in _EACH_ITERATION.items():
        if getattr(args, name, None):
            yield f'{name}: {what} in each iteration; {cure}'
    if getattr(args, 'rerun_mode', 'disabled') != 'disabled':
        yield (
            f'rerun_mode={args.rerun_mode}: ranks agree in each iteration on whether it is to be '
            'run again; --rerun-mode disabled'
        )
    ends = placement.only_route[0], placement.only_route[-1]
    if not getattr(args, 'untie_embeddings_and_output_weights', True) and ends[0] != ends[1]:
        yield (
            'untie_embeddings_and_output_weights=False: first and last rank sum the gradients of '
            'their copies of the embedding; untie them, or use a schedule with a V'
        )
    if getattr(args, 'mtp_num_layers', None) and ends[0] != ends[1]:
        yield (
            f'mtp_num_layers={args.mtp_num_layers}: first and last rank sum the gradients of their '
            'copies of the embedding; use a schedule with a V'
        )
    if getattr(args, 'log_interval', None) == 1:
        yield 'log_interval=1: each line gathers the timers of all ranks; --log-interval 10 or more'
    if getattr(args, 'timing_log_level', 0) and getattr(args, 'barrier_with_L1_time', False):
        yield (
            f'timing_log_level={args.timing_log_level}: timers wait for all ranks; '
            '--no-barrier-with-level-1-timing'
        )
