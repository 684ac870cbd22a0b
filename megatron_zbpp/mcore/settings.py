"""The settings of `megatron_zbpp.enable`, as a value."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zbpp.analysis.posting import LATE, require_known
from megatron_zbpp.ir import Schedule
from megatron_zbpp.mcore.lowered import require_one_route
from megatron_zbpp.runtime.groups import MessageKernels
from megatron_zbpp.schedules import Family, checked_chunks, find, require_no_limit
from megatron_zbpp.techniques import ASKED
from megatron_zbpp.techniques import find as find_technique

if TYPE_CHECKING:
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan
    from megatron_zbpp.techniques.amounts import Amount

AUTO = 'auto'
_CLEAN_STEPS = 10
_PRIORITIES = 'high', 'group'


@dataclass(frozen=True)
class Settings:
    """Equal where they ask for the same: aliases become names, and what is left out its default.

    Attributes:
        schedule: the name of a family, 'auto', or a schedule.
        num_chunks: stages a rank, for families that leave the choice.
        memory_limit: in activations of one microbatch on a full rank, for families that take one.
        watchdog_timeout: seconds without a step forward after which the process is ended; 0: never.
        watchdog_pause_timeout: the same between iterations; None: ten times that, at least 600.
        post_validation: after how many clean steps in a row optimizer steps no longer wait for all
            ranks; None: they always wait. True stands for 10, False for None.
        profile_iters: iterations that 'auto' measures.
        trace_dir: where to draw an iteration; None: nowhere.
        offload: 'half', 'all' or how many chunks of each rank go to the host between F and B, or
            'auto' for what costs no time, as measured; None: what the schedule says.
        freeze: which weight gradients are left out, and when; None: none.
        recompute: of which chunks forwards keep their input only, and run again in passes of their
            own; as `offload`.
        check_interval: with post-validation, behind how many early steps values of parameters are
            compared, beyond the first ten; 0: never.
        kept_gib: most GiB of old optimizer state that an early step keeps on the device; None: as
            much as there is memory for.
        message_ctas: most thread blocks of NCCL's kernels for a message between stages.
        message_priority: of these kernels: 'high', or 'group' for that of the pipeline's group.
        message_receives: when receives are posted: 'early', 'late' (as late as it costs nothing) or
            'latest'.

    Raises:
        ValueError: no such schedule, or a value that makes no sense; the message names it.
    """

    schedule: str | Schedule = 'zb-h1'
    num_chunks: int | None = None
    memory_limit: float | None = None
    watchdog_timeout: float | None = None
    watchdog_pause_timeout: float | None = None
    post_validation: bool | int | None = None
    profile_iters: int = 5
    trace_dir: Path | None = None
    offload: Amount | None = None
    freeze: FreezePlan | None = None
    recompute: Amount | None = None
    kept_gib: float | None = None
    check_interval: int = 10
    message_ctas: int = MessageKernels.ctas
    message_priority: str = 'high'
    message_receives: str = LATE

    def __post_init__(self) -> None:
        self._require_numbers()
        self._require_amounts()
        if self.message_priority not in _PRIORITIES:
            raise ValueError(
                f'message_priority is {self.message_priority!r}: give '
                + ' or '.join(map(repr, _PRIORITIES))
            )
        require_known(self.message_receives, 'message_receives')
        if self.freeze is not None and self.schedule == AUTO:
            raise ValueError('freeze: it is planned for one schedule: name that instead of auto')
        found = self._family()
        if found is not None:
            object.__setattr__(self, 'schedule', found.name)
            checked_chunks(found, self.num_chunks)
            require_no_limit(found, self.memory_limit)
        if isinstance(self.post_validation, bool):
            steps = _CLEAN_STEPS if self.post_validation else None
            object.__setattr__(self, 'post_validation', steps)
        object.__setattr__(self, 'watchdog_timeout', self.watchdog_timeout or 0)

    @property
    def kernels(self) -> MessageKernels:
        """How NCCL carries messages between stages."""
        return MessageKernels(self.message_ctas, self.message_priority == 'high')

    def _family(self) -> Family | None:
        """Return the family that is asked for; None: a schedule itself, or one that is planned."""
        if isinstance(self.schedule, str):
            if self.schedule.endswith(('.json', '.csv')):
                raise ValueError(
                    f'schedule {self.schedule!r} is a file: give megatron_zbpp.load of it, or its '
                    'path to --pipeline-schedule-file'
                )
            return None if self.schedule == AUTO else find(self.schedule)
        if not isinstance(self.schedule, Schedule):
            raise ValueError(
                f'schedule {self.schedule!r} is neither the name of one (zbpp list prints them), '
                f'nor {AUTO!r}, nor a Schedule'
            )
        require_one_route(self.schedule)
        for name in ('num_chunks', 'memory_limit'):
            if getattr(self, name) is not None:
                raise ValueError(f'{name}: the schedule that is given has its own: leave it out')
        return None

    @property
    def amounts(self) -> dict[str, Amount]:
        """How much is asked for of each technique, by its name."""
        asked = {name: getattr(self, name) for name in ASKED}
        return {name: amount for name, amount in asked.items() if amount is not None}

    def _require_amounts(self) -> None:
        """Raise ValueError unless what is asked for of techniques makes sense."""
        for name, amount in self.amounts.items():
            find_technique(name).require(amount, self.num_chunks or sys.maxsize)
            if self.schedule == AUTO:
                raise ValueError(
                    f'{name}: auto plans orders only: name a schedule, or give a plan that '
                    'zbpp plan --actions has made'
                )

    def _require_numbers(self) -> None:
        """Raise ValueError unless each number is one, and has a sense."""
        for name, least, whole in (
            ('num_chunks', 1, True),
            ('memory_limit', 0, False),
            ('watchdog_timeout', 0, False),
            ('watchdog_pause_timeout', 0, False),
            ('post_validation', 0, True),
            ('profile_iters', 1, True),
            ('kept_gib', 0, False),
            ('check_interval', 0, True),
            ('message_ctas', 1, True),
        ):
            value = getattr(self, name)
            if value is None or (name == 'post_validation' and isinstance(value, bool)):
                continue
            number = isinstance(value, int if whole else int | float)
            if not number or isinstance(value, bool) or not isfinite(value) or value < least:
                kind = 'a whole number' if whole else 'a number'
                or_else = ', True or False' if name == 'post_validation' else ''
                raise ValueError(f'{name} is {value!r}: give {kind} from {least} up{or_else}')


def folder(trace_dir: object) -> Path | None:
    """Return where to draw, as a path; None: nowhere.

    Raises:
        ValueError: it is no path, or that of something else than a folder.
    """
    if trace_dir is None:
        return None
    if not isinstance(trace_dir, str | Path) or not str(trace_dir):
        raise ValueError(f'trace_dir is {trace_dir!r}: give the path of a folder, or None')
    path = Path(trace_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f'trace_dir is {str(path)!r}, which is a file: give the path of a folder')
    return path


def freezing(file: object) -> FreezePlan | None:
    """Return the plan of freezing in a file; None: there is no freezing.

    Raises:
        ValueError: it is no path, or the file has no such plan.
        OSError: it cannot be read.
    """
    if file is None:
        return None
    if not isinstance(file, str | Path):
        raise ValueError(f'freeze is {file!r}: give the path of what zbpp freeze -o wrote, or None')
    from megatron_zbpp.partitioning.freeze_plans import FreezePlan

    try:
        return FreezePlan.from_json(Path(file).read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{file}: {error}: give what zbpp freeze -o wrote') from error
