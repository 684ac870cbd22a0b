"""The iteration of a setup: its time by simulation, bytes of each rank, idle GPU time.

Many microbatches are not simulated one by one: behind three rounds of the pipeline each takes as
long as the one before it, so two short runs tell the rest. Behind the last pass come the reduction
of gradients, the optimizer's step and the gathering of parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import HOST, TRANSFERS
from megatron_zbpp.partitioning.layers import Devices
from megatron_zbpp.partitioning.setup_costs import Job, Setup, SetupLayers, layer_costs
from megatron_zbpp.partitioning.shapes import bytes_of_a_parameter
from megatron_zbpp.partitioning.space import Partition, parameters_held, stage_costs
from megatron_zbpp.schedules import build, find

# Measured over predicted time of published runs (docs/advise.md, which a test holds to this):
# by what a matrix product reaches, and by measured layers.
BY_RATES, BY_TIMES = (0.95, 1.2), (0.99, 1.18)
_ROUNDS = 3  # of p microbatches until each takes as long as the one before
_GRADIENT, _PARAMETER, _STEP = 4, 2, 30  # bytes of a parameter: reduced, gathered, moved by a step


class Prediction(NamedTuple):
    """An iteration of a setup."""

    setup: Setup  # that it is of
    microbatches: int  # of the iteration
    seconds: float  # that it takes
    nbytes: tuple[float, ...]  # most that the tensors of each pipeline rank take
    idle: float  # share of all ranks' time between the first pass and the last that no pass takes
    counts: tuple[int, ...]  # layers of each stage, embedding and loss included


class Stages(NamedTuple):
    """Stages of a setup."""

    placement: Placement  # of them
    counts: tuple[int, ...]  # layers of each
    costs: Costs  # seconds and bytes of each
    fixed: tuple[float, ...]  # bytes of each rank that do not depend on the schedule
    rest: float  # seconds of an iteration behind the last pass

    def bound(self, microbatches: int) -> float:
        """Return seconds that no schedule on these stages is below."""
        times, placement = self.costs.times, self.placement
        work = [sum(own) for own in zip(*(times[kind] for kind in 'FBW'), strict=True)]
        heads = [sum(times['F'][:stage]) for stage in range(placement.num_stages)]
        return self.rest + max(
            heads[own[0]] + microbatches * sum(work[stage] for stage in own)
            for own in map(placement.stages, range(placement.num_ranks))
        )

    @property
    def least(self) -> float:
        """Bytes that the fullest rank has at least: with one microbatch."""
        held = self.costs.amounts['activation']
        return max(
            fixed + sum(held[stage] for stage in self.placement.stages(rank))
            for rank, fixed in enumerate(self.fixed)
        )


def placement_of(setup: Setup) -> Placement:
    """Return where the stages of a setup are."""
    return _placement(setup.schedule, setup.pp, setup.chunks)


@lru_cache(maxsize=1024)
def _placement(name: str, p: int, chunks: int) -> Placement:
    try:
        return _built(name, p, 1, chunks).placement
    except ValueError:  # some take no fewer microbatches than ranks
        return _built(name, p, p, chunks).placement


def stages_of(job: Job, setup: Setup) -> Stages:
    """Return the stages of a setup."""
    if problem := job.why_impossible(setup):
        raise ValueError(problem)
    return _stages(job, replace(setup, schedule='', chunks=1), placement_of(setup))


@lru_cache(maxsize=8192)
def _stages(job: Job, setup: Setup, placement: Placement) -> Stages:
    """Return the stages of all setups that differ in their schedule alone."""
    counts = job.counts(setup, placement)
    plain = replace(setup, pp=1, layers=())  # layers know nothing of these
    made = _layers(job, plain, job.replicas(setup))
    partition = Partition(placement, counts, tuple(range(setup.pp)))
    costs = stage_costs(made.layers, _devices(job, setup.pp), partition)
    static = parameters_held(made.layers, partition)
    fixed = tuple(own + made.transient for own in static)
    return Stages(placement, counts, costs, fixed, _rest(job, setup, static, costs))


@lru_cache(maxsize=4096)
def _layers(job: Job, setup: Setup, replicas: int) -> SetupLayers:
    """Return the layers of a setup with so many replicas, whatever its pipeline is."""
    return layer_costs(replace(job, gpus=replicas * setup.tp * job.cp), setup)


@lru_cache(maxsize=256)
def _devices(job: Job, pp: int) -> Devices:
    nodes = [rank * (job.gpus // pp) // job.gpus_per_node for rank in range(pp)]
    rates = {True: 1e9 * job.within, False: 1e9 * job.between}
    rows = tuple(tuple(rates[a == b] for b in nodes) for a in nodes)
    return replace(Devices.alike(pp), bandwidth=rows)


def _rest(job: Job, setup: Setup, static: tuple[float, ...], costs: Costs) -> float:
    """Return seconds behind the last pass: gradients, step, parameters."""
    dp, sharing = job.replicas(setup) * job.cp, job.shape_of(setup).dp
    most = max(static) / bytes_of_a_parameter(sharing)  # parameters of the fullest rank
    memory = job.shape.bandwidth
    step = _STEP * most / sharing / (memory * 1e9) if memory else 0.0
    across = dp * setup.tp > job.gpus_per_node
    near = max(1, min(dp, job.gpus_per_node // setup.tp))  # replicas of a node share its links
    rate = 1e9 * min(job.within, job.between * near if across else job.within)
    moved = _GRADIENT + (_PARAMETER if job.shards_optimizer else _GRADIENT)
    talk = moved * most * (dp - 1) / dp / rate
    if job.overlaps:
        talk = max(0.0, talk - min(map(sum, zip(costs.times['B'], costs.times['W'], strict=True))))
    return talk + step


def _build(name: str, p: int, m: int, chunks: int, costs: Costs | None = None) -> Schedule:
    number = chunks if 'num_chunks' in find(name).options else None
    return build(name, p, m, num_chunks=number, costs=costs)


_built = lru_cache(maxsize=512)(_build)


def predict(job: Job, setup: Setup, stages: Stages | None = None) -> Prediction:
    """Return the iteration of a setup; `stages`: of it, if they are known."""
    stages = stages or stages_of(job, setup)
    costs, m, p = stages.costs, job.microbatches(setup), setup.pp
    if find(setup.schedule).moves:
        copies = tuple(held / (job.host * 1e9) for held in costs.amounts['activation'])
        costs = costs.with_times(**dict.fromkeys(TRANSFERS[HOST], copies))
    few = (_ROUNDS - 1) * p + m % p
    if m <= few + p:
        runs = [_run(setup, m, costs)]
    else:
        runs = [_run(setup, count, costs) for count in (few, few + p)]
        if runs[0][1] != runs[1][1]:  # memory grows with microbatches: no steady state
            runs = [_run(setup, m, costs)]
    span, held = runs[-1]
    if len(runs) > 1:
        span += (m - few - p) * (span - runs[0][0]) / p
    work = m * sum(sum(costs.times[kind]) for kind in 'FBW')
    nbytes = tuple(own + more for own, more in zip(stages.fixed, held, strict=True))
    idle = max(0.0, 1 - work / (p * span)) if span else 0.0
    return Prediction(setup, m, span + stages.rest, nbytes, idle, stages.counts)


def _run(setup: Setup, m: int, costs: Costs) -> tuple[float, tuple[float, ...]]:
    sizes = setup.schedule, setup.pp, m, setup.chunks
    adapts = 'costs' in find(setup.schedule).options
    schedule = _build(*sizes, costs) if adapts else _built(*sizes)
    return simulate(schedule, costs).makespan, peak(schedule, costs)
