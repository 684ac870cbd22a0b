"""What is known of the layers and ranks before anything is planned: given, or measured on a GPT."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.common.spawning import joined, spawned
from benchmarks.partition import measured
from benchmarks.partition.cases import Entry, Known, worst
from benchmarks.partition.place import Place
from benchmarks.partition.run import Job, runner_of
from megatron_zbpp.analysis.fit_costs import middle
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.guests.autotune.repartition import look
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.fitting import fit_layers
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.schedules import build

FUSED, SPLIT = '1f1b', 'zb-h1'  # schedules by which a GPT is profiled
_BYTES = 4  # of a number


def alone(gpt: measured.Gpt, place: Place) -> tuple[Layers, dict[str, Any]]:
    """Return the layers of a GPT whose stages are measured one after the other, and what to tell.

    Their times are also compared with those of its shape.

    Raises:
        RuntimeError: a rank failed.
    """
    layout, found = measured.stages(gpt, (SPLIT,), place)
    costs = found[SPLIT]
    layers, error = fit_layers([(layout, costs)])
    shape = Shape(
        'gpt',
        gpt.layers,
        hidden=gpt.hidden,
        heads=gpt.hidden // measured.HEAD,
        vocab=gpt.words,
        seq=gpt.sequence,
        tflops=1.0,
    )
    cuts = tuple(map(len, layout.split('|')))
    by_shape = [sum(layer.time for layer in own) for own in layers_of(shape).stages(cuts)]
    times = _times(costs)
    rate = sum(by_shape) / sum(times)  # the one number that a shape does not tell
    off = worst(times, [each / rate for each in by_shape])
    print(_said(layout, costs))
    print(f'least squares over the layers: a stage is off by {error:.1%} at most')
    print(f'by its shape at {1e3 * rate:.3g} GFLOP/s: a stage is off by {off:.1%} at most')
    return layers, {'layout': layout, 'stages_s': times, 'fit_error': error, 'shape_error': off}


def beside(gpt: measured.Gpt, place: Place, links: Devices) -> tuple[Known, Known, dict[str, Any]]:
    """Return what `auto` would know of a GPT that trains, of split and of fused backwards.

    All ranks compute beside each other, as they will when it is trained.

    Args:
        gpt: that is profiled.
        place: where ranks run.
        links: whose bandwidths are known.

    Raises:
        RuntimeError: a rank failed.
    """
    layout, found = measured.stages(gpt, (FUSED, SPLIT), place)
    size = float(_BYTES * gpt.hidden * gpt.sequence)
    known: dict[str, Known] = {}
    errors = []
    for name, costs in found.items():
        looked = look(layout, build(name, gpt.num_ranks, gpt.num_microbatches), costs, 'makespan')
        layers = Layers(tuple(replace(layer, output=size) for layer in looked.layers))
        known[name] = Known(layers, replace(looked.devices, bandwidth=links.bandwidth))
        errors.append(looked.error)
        told = f'; {looked.unequal}' if looked.unequal else ''
        print(f'{name}: {_said(layout, costs)}, fitted within {looked.error:.1%}{told}')
    times = {name: _times(costs) for name, costs in found.items()}
    said = {'layout': layout, 'stages_s': times, 'fit_errors': errors}
    return known[SPLIT], known[FUSED], said


def again(job: Job) -> tuple[list[Entry], dict[str, dict[str, float]]]:
    """Return entries, all of ours, with predictions by what their own passes and collectives take.

    Those times are told, too: by entry the mean seconds of S and T, and those of each collective by
    its message.

    Raises:
        RuntimeError: a rank failed.
    """
    found: dict[str, list[Costs]] = defaultdict(list)
    for name, costs in spawned(_rank, len(job.factors), job):
        found[name].append(costs)
    entries, said = [], {}
    for entry in job.entries:
        costs, p = middle(found[entry.name]), len(job.factors)
        predicted = simulate(entry.schedule, costs).makespan
        entries.append(replace(entry, predicted=predicted))
        times = {kind: fmean(costs.times[kind][-p:]) for kind in 'ST'} | dict(costs.collectives)
        said[entry.name] = times
        text = ', '.join(f'{name} {1e3 * seconds:.0f} ms' for name, seconds in times.items())
        print(f'{entry.name}: {text}')
    return entries, said


def _rank(rank: int, job: Job, port: int, queue: Any) -> None:
    p = len(job.factors)
    with joined(rank, p, job.place.enter(rank, p, port), pipeline_model_parallel_size=p):
        assert job.gpt is not None, 'of real passes'
        runners = {entry.name: runner_of(entry, job, 1.0) for entry in job.entries}
        for found in measured.profiled(rank, runners, job.gpt.iterations, job.place):
            if rank == 0:
                queue.put(found)


def _times(costs: Costs) -> list[float]:
    return [
        sum(each) for each in zip(costs.times['F'], costs.times['B'], costs.times['W'], strict=True)
    ]


def _said(layout: str, costs: Costs) -> str:
    times = ', '.join(f'{1e3 * time:.0f}' for time in _times(costs))
    return f'measured stages {layout}: {times} ms'
