"""Flags of other forks: understood, with a word on which flag to use instead."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.runtime.log import job_log

_V_SCHEDULES = {'zb': 'zb-v', 'half': 'v-half', 'min': 'v-min'}
_LIMIT = '--zero-bubble-max-pending-backward'
_CHUNKS = '--offload-chunk-num'
_ALIASES: dict[str, dict[str, Any]] = {
    '--enable-zero-bubble': {'action': 'store_true'},
    '--zero-bubble-v-schedule': {'action': 'store_true'},
    '--zero-bubble-v-schedule-mem-setup': {'choices': list(_V_SCHEDULES)},
    _LIMIT: {'metavar': 'A'},
    '--enable-1f1b-v': {'action': 'store_true'},
    '--enable-zbh1-pipeline': {'action': 'store_true'},
    _CHUNKS: {'metavar': 'N'},
    '--offload-time': {'metavar': 'K'},
    '--auto-offload-time': {'action': 'store_true'},
    '--enable-zb-runtime': {'action': 'store_true'},
    '--interleave-group-size': {'metavar': 'N'},
    '--allow-padding-num-layers': {'action': 'store_true'},
    '--enable-exactly-numeric-match': {'action': 'store_true'},
    '--zero-bubble-pipeline-timers-start-iter': {'metavar': 'N'},
    '--zero-bubble-pipeline-timers-end-iter': {'metavar': 'N'},
}
_NEEDLESS = {
    'offload_time': '--pipeline-offload auto measures how long copies take',
    'auto_offload_time': '--pipeline-offload auto measures how long copies take',
    'enable_zb_runtime': 'every --pipeline-schedule has its runtime',
    'interleave_group_size': 'a schedule has its own order of microbatches; gis and gis-h have '
    'groups of the size that takes least memory',
    'allow_padding_num_layers': 'layers need not divide among the stages',
    'enable_exactly_numeric_match': 'all numbers match exactly, always',
    'zero_bubble_pipeline_timers_start_iter': 'see --pipeline-schedule-profile-iters',
    'zero_bubble_pipeline_timers_end_iter': 'see --pipeline-schedule-profile-iters',
}


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """Add a group for them; one that is not given leaves nothing in Megatron's list."""
    aliases = parser.add_argument_group('pipeline schedule: names of other forks, deprecated')
    for alias, options in _ALIASES.items():
        aliases.add_argument(
            alias, help='says what to use instead', default=argparse.SUPPRESS, **options
        )


def translate(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of our fields that flags of other forks stand for.

    Raises:
        ValueError: flags that contradict each other, or a limit that is no number.
    """
    given = vars(args).get
    setup = given('zero_bubble_v_schedule_mem_setup')
    limit, chunks = given('zero_bubble_max_pending_backward'), given('offload_chunk_num')
    offload = {} if chunks is None else {'pipeline_offload': chunks}
    meant = {
        '1f1b-v': given('enable_1f1b_v'),
        'zb-h1': given('enable_zbh1_pipeline'),
        _V_SCHEDULES[setup or 'zb']: given('zero_bubble_v_schedule') or setup,
    }
    names = [name for name, asked in meant.items() if asked]
    if len(names) > 1:
        raise ValueError(f'flags that mean {" and ".join(names)}: give --pipeline-schedule instead')
    if names or not given('enable_zero_bubble'):
        if limit is not None:
            job_log.warning(
                f'{_LIMIT} {limit} has no effect: it is a limit for --enable-zero-bubble alone'
            )
        return ({'pipeline_schedule': names[0]} if names else {}) | offload
    if limit in (None, 'auto'):
        return {'pipeline_schedule': 'zb-1p'} | offload
    try:
        within = {'pipeline_schedule_memory_limit': float(limit)}
    except ValueError:
        raise ValueError(f'{_LIMIT} {limit}: give a number, or auto') from None
    return {'pipeline_schedule': 'zb-1p'} | within | offload


def announce(args: argparse.Namespace, translated: dict[str, Any]) -> None:
    """Say which of our flags to give instead, and which of the others have no effect."""
    if translated:
        instead = ' '.join(f'{flag(name)} {value}' for name, value in translated.items())
        job_log.warning(f'deprecated flags: use {instead}')
    for name, why in _NEEDLESS.items():
        if vars(args).get(name):
            job_log.warning(f'{flag(name)} has no effect: {why}')
