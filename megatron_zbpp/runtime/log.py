"""Messages to the user of a run: Python's logger `megatron_zbpp`, on stderr unless configured."""

from __future__ import annotations

import logging
import os
import sys

LEVEL = 'MEGATRON_ZBPP_LOG_LEVEL'  # in the environment

rank_log = logging.getLogger('megatron_zbpp')  # what each rank says by itself
job_log = rank_log.getChild('job')  # what all ranks would say: the first one does


class _Stderr(logging.Handler):
    """Writes to stderr as long as the program has given the logger no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if rank_log.handlers == [self]:
            print(f'megatron_zbpp: {self.format(record)}', file=sys.stderr, flush=True)


def _on_first_rank(_: logging.LogRecord) -> bool:
    dist = sys.modules.get('torch.distributed')
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get('RANK', 0)) == 0


# Level and handler, where the program has given none.
job_log.addFilter(_on_first_rank)
_level = os.environ.get(LEVEL, '')
try:
    rank_log.setLevel(_level.upper() or rank_log.level or logging.INFO)
except ValueError:
    raise ValueError(f'{LEVEL} is {_level!r}: give INFO, WARNING, ERROR or CRITICAL') from None
if not rank_log.handlers:
    rank_log.addHandler(_Stderr())
    rank_log.propagate = False  # to Megatron's handler, which does not say whose messages are
