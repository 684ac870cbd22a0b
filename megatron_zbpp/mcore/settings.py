"""What `megatron_zbpp.enable` is asked for, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_zbpp.ir import Schedule
from megatron_zbpp.schedules import find

AUTO = 'auto'
_CLEAN_STEPS = 10


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

    Raises:
        ValueError: no such schedule.
    """

    schedule: str | Schedule = 'zb-h1'
    num_chunks: int | None = None
    memory_limit: float | None = None
    watchdog_timeout: float | None = None
    watchdog_pause_timeout: float | None = None
    post_validation: bool | int | None = None
    profile_iters: int = 5
    trace_dir: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.schedule, str) and self.schedule != AUTO:
            object.__setattr__(self, 'schedule', find(self.schedule).name)
        if isinstance(self.post_validation, bool):
            steps = _CLEAN_STEPS if self.post_validation else None
            object.__setattr__(self, 'post_validation', steps)
        object.__setattr__(self, 'watchdog_timeout', self.watchdog_timeout or 0)
        if self.trace_dir is not None:
            object.__setattr__(self, 'trace_dir', Path(self.trace_dir))
