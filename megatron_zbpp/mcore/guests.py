"""The guests that settings ask for, or the job. One that nobody asks for is not imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_zbpp.guests.base import Guest
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.runtime.log import job_log


def asked_for(settings: Settings) -> Iterator[Guest]:
    """Yield the guests of a run, in the order in which they hear of an iteration."""
    if settings.dropout_seeds:
        from megatron_zbpp.mcore import dropout_seeds

        yield dropout_seeds.DropoutSeeds()
    if settings.freeze_plan is not None:
        from megatron_zbpp.guests import freeze_run

        yield freeze_run.FreezeRun(settings.freeze_plan, job_log.warning)
    if settings.trace_dir is not None:
        from megatron_zbpp.guests import tracing

        yield tracing.Tracer(Path(settings.trace_dir))
    if 'nemo.lens' in sys.modules:  # as where Megatron has telemetry
        from megatron_zbpp.guests import telemetry

        yield telemetry.Spans()
    if settings.offload == AUTO:
        from megatron_zbpp.guests import offload_tuner

        yield offload_tuner.OffloadTuner(settings.profile_iters)
    if settings.schedule == AUTO:
        from megatron_zbpp.guests import auto_plan

        objective = 'makespan' if settings.post_validation is None else 'window'
        yield auto_plan.AutoPlan(settings.profile_iters, settings.memory_limit, objective=objective)
