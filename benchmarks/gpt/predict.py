"""From one measured stage to pipelines of many: predictions, by the simulator.

A pipeline of p such stages, as deep as they make it: every rank as the one that was measured, in
bf16 with Adam's state of its own. Embedding, output layer and their imbalance are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from benchmarks.gpt import models
from benchmarks.gpt.worker import Row
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import build

# bf16 weight, fp32 gradient, master weight and Adam's two moments
_BYTES_PER_PARAMETER = 2 + 4 + 4 + 4 + 4


@dataclass(frozen=True)
class Pipeline:
    """What to predict for every measured stage.

    Attributes:
        runner, schedule: whose, and its name.
        p, m: ranks and microbatches.
        chunks: stages a rank.
        link: bytes a second between neighbours.
    """

    runner: str
    schedule: str
    p: int
    m: int
    chunks: int
    link: float


def predictions(
    stages: Sequence[Row], pipelines: Sequence[Pipeline], processes: int
) -> Iterator[list[Row]]:
    """Yield the rows of each pipeline, as they are done: small ones first.

    Args:
        stages: measured rows.
        pipelines: to predict; those that cannot be had give no rows.
        processes: that share the work.
    """
    ordered = sorted(pipelines, key=lambda pipeline: pipeline.p * pipeline.m)
    with ProcessPoolExecutor(processes, get_context('spawn')) as pool:
        for done in as_completed([pool.submit(predicted, stages, each) for each in ordered]):
            yield done.result()


def predicted(stages: Sequence[Row], pipeline: Pipeline) -> list[Row]:
    """Return a row for each measured stage; none where the schedule cannot be had."""
    try:
        schedule = build(pipeline.schedule, pipeline.p, pipeline.m, num_chunks=pipeline.chunks)
    except ValueError:
        return []
    return [_row(stage, pipeline, schedule) for stage in stages]


def costs_of(stage: Row, schedule: Schedule, link: float) -> Costs:
    """Of a pipeline of such stages, in seconds and bytes.

    A schedule without W passes runs the fused backward, and holds activations until its end.
    """
    splits = any(p.kind == W for order in schedule.passes for p in order)
    b, w = stage['b_seconds'], stage['w_seconds']
    if not splits:
        b, w = stage['fused_bw_seconds'], 0.0
    f = stage['f_seconds'] if splits else stage['fused_f_seconds']
    comm = stage['message_bytes'] / link
    costs = Costs.uniform(schedule.placement, f, b, w, comm)
    held = [tuple(stage[name] * share for share in costs.amounts['activation']) for name in _HELD]
    return costs.with_amounts(activation=held[0], retained=held[1])


_HELD = ('b_bytes', 'w_bytes')


def _row(stage: Row, pipeline: Pipeline, schedule: Schedule) -> Row:
    costs = costs_of(stage, schedule, pipeline.link)
    timeline = simulate(schedule, costs)
    seconds = timeline.makespan + stage['optimizer_seconds']
    model = models.find(stage['model'])
    tokens = pipeline.m * stage['micro_batch'] * model.sequence
    flops = tokens * stage['layers'] * model.layer_flops
    static = stage['parameters'] * _BYTES_PER_PARAMETER
    held = max(peak(schedule, costs))
    return {
        'model': stage['model'],
        'runner': pipeline.runner,
        'schedule': pipeline.schedule,
        'p': pipeline.p,
        't': 1,
        'm': pipeline.m,
        'chunks': pipeline.chunks,
        'micro_batch': stage['micro_batch'],
        'link_bytes_per_second': pipeline.link,
        'layers': stage['layers'] * pipeline.p,
        'stage_f_seconds': stage['f_seconds'],
        'median_seconds': seconds,
        'tokens_per_second_per_gpu': tokens / seconds / pipeline.p,
        'tflops_per_gpu': flops / seconds / 1e12,
        'bubble': timeline.bubble_makespan,
        'idle_all_ranks': timeline.idle_all_ranks,
        'activation_bytes': held,
        'peak_bytes': static + held,
        'fits': stage['device_bytes'] is None or static + held < stage['device_bytes'],
        'device': stage['device'],
        'device_peak_tflops': stage['device_peak_tflops'],
    }
