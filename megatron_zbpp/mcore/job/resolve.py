"""Resolves a request: what a job runs, and writes into Megatron's settings, or all its problems.

Flags, Megatron-Bridge, `zbpp doctor` and readers of launch lines differ in their facts only.
Nothing is written into those: `Job.writes` has the values, by the names of Megatron's arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

from megatron_zbpp.emulation import cpu, te
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.mcore import model_settings
from megatron_zbpp.mcore.job import rules
from megatron_zbpp.mcore.job.rules import Context, Refusal, check
from megatron_zbpp.mcore.job.sizes import Sizes
from megatron_zbpp.mcore.options import Checks, Names
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import BY_FLAG, Request, Settings
from megatron_zbpp.runtime.log import job_log


@dataclass(frozen=True)
class Facts:
    """Facts of the model and the machine, as far as they are known."""

    settings: Any = None  # Megatron's arguments or config; read only
    world_size: int = 1  # processes of the job
    # `on_cpu`, `with_te` and `by_bridge` of `rules.Context`
    machine: Mapping[str, bool] = field(default_factory=dict[str, bool])
    given: Collection[str] = ()  # names of settings that the person gave, of those with defaults
    # of torchrun; empty: the job does not start here
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    # of settings; those of an enabled plugin have been made
    programs: Callable[[Settings], Programs] = Programs

    @classmethod
    def here(
        cls,
        settings: Any,
        given: Collection[str],
        programs: Callable[[Settings], Programs],
        **machine: bool,
    ) -> Facts:
        """Return the facts of a job that starts in this process."""
        machine |= {'on_cpu': cpu.installed(), 'with_te': te.installed()}
        world_size = int(os.environ.get('WORLD_SIZE', 1))
        return cls(settings, world_size, machine, given, os.environ, programs)


@dataclass
class Job:
    """The result of a request, filled in as far as its problems allow."""

    names: Names  # of options, as the person spells them
    settings: Settings | None = None  # of the schedule
    programs: Programs | None = None  # of the schedule; None: one pipeline rank has none
    placement: Placement | None = None  # of the stages
    counts: Sequence[int] = ()  # numbers of microbatches in an iteration of training
    # values for Megatron's settings, by their names
    writes: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])  # what else to know
    # settings of Megatron's that the schedule does not train with
    refused: tuple[Refusal, ...] = ()
    checks: Checks = field(default_factory=Checks)  # with all other problems

    def require(self) -> None:
        """Raise one error for all problems, in the names of the person."""
        if self.refused and self.programs is not None:
            with self.checks.one(self.refused[0].setting):
                key = f'schedule {self.programs.key}'
                which = self.names.of('schedule') if self.names.flags else key
                reasons = '. '.join(dict.fromkeys(map(str, self.refused)))
                raise NotImplementedError(f'with {which}, {reasons}')
        self.checks.require_all(self.names)


def resolve(request: Request, facts: Facts) -> Job:
    """Return the job of a request, with all problems that these facts show."""
    sizes, job = Sizes(facts.settings, names=request.names), Job(request.names)
    checks, several = job.checks, sizes.ranks > 1
    checks.problems += request.problems
    countable, stock, plan, chunks = False, None, None, request.options.get('num_chunks')
    source: str | Schedule | None = request.options.get('schedule')
    if several:
        with checks.one('num_layers'):
            sizes.require_plain()
            countable = True
            stock = sizes.stock_layout()  # before a plan writes its own
    if request.file is not None:
        source = None
        with checks.one('schedule'):
            from megatron_zbpp.ir.formats import load_plan

            plan = load_plan(Path(request.file))
    if plan is not None:
        source, file = plan.schedule, request.file or ''
    if plan is not None and several:
        granularity = getattr(facts.settings, 'recompute_granularity', None)
        with checks.one('recompute_granularity'):
            if plan.selective and granularity != 'selective':
                raise ValueError(
                    f"{file} was planned with Megatron's selective recomputation, without which it "
                    'holds more: give {recompute_granularity:selective}, or plan without --actions '
                    'selective'
                )
        if plan.lacks:
            job_log.warning(f'{file}: {plan.lacks}')
        if plan.layout is not None:
            with checks.one('pipeline_model_parallel_layout'):
                job.writes |= sizes.planned(plan.layout, file)
                job.notes.append(f'layers as the plan has them: {plan.layout}')
        sizes = sizes.with_(job.writes)
    if source is None:
        return job
    if countable and chunks is None:
        with checks.one('num_chunks'):
            chunks = sizes.chunks_for(source)
    start = request.options.get('same_start', True)
    start = stock if start is True and stock is not None else start
    job.settings = request.settings(checks, schedule=source, num_chunks=chunks, same_start=start)
    if not several:
        none = 'one pipeline rank has no pipeline: {schedule} changes nothing'
        job.notes.append(request.names.fill(none))
    elif job.settings is not None:
        _take_schedule(job, job.settings, facts, sizes, countable)
    return job


def _take_schedule(
    job: Job, settings: Settings, facts: Facts, sizes: Sizes, countable: bool
) -> None:
    """Prove the schedule for all sizes of the job, beside Megatron's settings."""
    checks, names, ranks = job.checks, job.names, sizes.ranks
    with checks.one('schedule', 'memory_limit', *settings.amounts):
        programs = facts.programs(settings)
        programs.require_pairs(sizes.replicas(facts.world_size))
        job.placement = programs.placement(ranks)
        job.programs = programs
    if job.programs is None or job.placement is None:
        return
    overlaps = getattr(facts.settings, model_settings.OVERLAP, False)
    job.programs.join(overlaps)
    ignored = superseded(facts.settings, job.programs.traits(ranks).splits, names)
    job.writes |= dict.fromkeys(ignored, False)
    job.notes += ignored.values()
    reruns = getattr(facts.settings, 'rerun_mode', 'disabled') != 'disabled'
    if job.programs.runs_ahead and reruns and 'rerun_mode' not in facts.given:
        job.writes['rerun_mode'] = 'disabled'
        waits = 'or all ranks would wait for each other in each iteration'
        job.notes.append(names.fill(f'{{rerun_mode:disabled}}, {waits}'))
    sources = SimpleNamespace(**job.writes), facts.settings
    job.refused = refused(sources, job.programs, ranks, names=names, **facts.machine)
    job.counts = sizes.microbatches(facts.world_size)
    with checks.one('slices'):
        job.programs.cuts(facts.settings, getattr(facts.settings, 'seq_length', None))
        if job.programs.to_find_slices and job.counts:
            settled = resolve_name('megatron_zbpp.mcore.techniques.slice_choice:settled')
            settings, note = settled(settings, facts.settings, ranks, job.counts)
            job.notes.append(names.fill(note))
            job.settings, job.programs = settings, facts.programs(settings)
            job.programs.join(overlaps)
    if not job.programs.to_find_slices:
        with checks.one('schedule', 'memory_limit', *settings.amounts):
            for count in job.counts:
                lowered = job.programs.lowered(ranks, count, forward_only=False)
                if lowered.moves:
                    from megatron_zbpp.mcore.job.model_shape import require_host_memory

                    require_host_memory(facts.settings, lowered.schedule, facts.environment)
            sizes.require_every_size(facts.world_size, job.programs)
    if countable:
        with checks.one('pipeline_model_parallel_layout'):
            job.writes |= sizes.placed(job.placement)
    if job.programs.runs_ahead:
        waits = check(Context(sources, placement=job.placement), rules.BARRIERS, names)
        job.notes += [f'all ranks wait: {each}' for each in waits]


def refused(
    # objects with Megatron's settings: the first one that has a setting counts; settings that all
    # lack are not set
    sources: tuple[Any, ...],
    programs: Programs,  # of the schedule
    num_ranks: int,  # pipeline ranks
    num_microbatches: int | None = None,  # of an iteration; None: any number
    names: Names = BY_FLAG,  # of settings, as the reader spells them
    **machine: Any,  # `on_cpu`, `with_te` and `by_bridge` of `Context`
) -> tuple[Refusal, ...]:
    offloads = Context(sources).get(model_settings.OFFLOADING, False)
    traits: dict[str, Any] = programs.traits(num_ranks)._asdict()
    context = Context(
        sources,
        placement=programs.placement(num_ranks),
        in_order=bool(offloads) and programs.in_order(num_ranks, num_microbatches),
        **traits,
        **machine,
    )
    return tuple(check(context, rules.REFUSALS, names))


def superseded(settings: Any, splits: bool = False, names: Names = BY_FLAG) -> dict[str, str]:
    """Return settings that have no effect, as the schedule does the same by itself, and why."""
    ignored = check(Context((settings,), splits=splits), rules.SUPERSEDED)
    return {r.setting: f'{names.of(r.setting)} has no effect: {r.reason}' for r in ignored}


def require_taken_back(config: Any) -> None:
    """Raise where a built model has a superseded setting, by which its layers keep gradients."""
    for name in superseded(config):
        raise NotImplementedError(
            f'{name}=True, and the model was built so, without the plugin: call '
            'megatron_zbpp.enable() before the model is built, which takes it back'
        )
