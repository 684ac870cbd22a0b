"""What is known of the layers and ranks before anything is planned: given, or measured on a GPT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from benchmarks.partition import measured
from benchmarks.partition.cases import (
    MEGATRON,
    ZBPP,
    Entry,
    Known,
    even,
    forecast,
    sharded,
    worst,
)
from benchmarks.partition.place import Place
from benchmarks.partition.run import Sample
from megatron_zbpp.analysis.fit_costs import middle
from megatron_zbpp.guests.auto_plan import fit_layers_to_run
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.fitting import fit_layers
from megatron_zbpp.partitioning.layers import Devices, Layers
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
    fitted = {name: _fitted(gpt, name, layout, costs, links) for name, costs in found.items()}
    times = {name: _times(costs) for name, costs in found.items()}
    errors = [error for _, error in fitted.values()]
    said = {'layout': layout, 'stages_s': times, 'fit_errors': errors}
    return fitted[SPLIT][0], fitted[FUSED][0], said


def beside_all(known: Known, fused: Known, gpt: measured.Gpt, shards: bool) -> dict[str, Entry]:
    """Return what is measured in turn with all others, by the library whose times it tells.

    Args:
        known: of layers and ranks.
        fused: the same of backwards that are not split, as stock's.
        gpt: that is trained.
        shards: whether ours have the output layer on all ranks.
    """
    m = gpt.num_microbatches
    split = sharded(known, m, SPLIT, gpt.tied) if shards else even(known, m, ZBPP, SPLIT)
    return {MEGATRON: even(fused, m, ZBPP, FUSED), ZBPP: split}


def forecasts(
    gpt: measured.Gpt,
    chosen: Sequence[Entry],
    profiled: Mapping[str, Entry],
    samples: Sequence[Sequence[Sample]],
    links: Devices,
) -> list[float]:
    """Return the seconds of iterations by what passes of `profiled` take, which took turns.

    Args:
        gpt: that was trained.
        chosen: whose iterations are forecast.
        profiled: see `beside_all`.
        samples: of these.
        links: whose bandwidths are known.
    """
    found = {}
    for (runner, entry), own, name in zip(profiled.items(), samples, (FUSED, SPLIT), strict=True):
        costs = middle([sample.costs for sample in own if sample.costs is not None])
        found[runner] = _fitted(gpt, name, entry.layout, costs, links)[0], costs
    return [forecast(each, *found[each.runner]) for each in chosen]


def _fitted(
    gpt: measured.Gpt, name: str, layout: str, costs: Costs, links: Devices
) -> tuple[Known, float]:
    """Return layers and ranks that fit the stages of a schedule, and by how much one is off."""
    looked = fit_layers_to_run(
        layout, build(name, gpt.num_ranks, gpt.num_microbatches), costs, 'makespan'
    )
    size = float(_BYTES * gpt.hidden * gpt.sequence)
    layers = Layers(tuple(replace(layer, output=size) for layer in looked.layers))
    told = f'; {looked.unequal}' if looked.unequal else ''
    print(f'{name}: {_said(layout, costs)}, fitted within {looked.error:.1%}{told}')
    return Known(layers, replace(looked.devices, bandwidth=links.bandwidth)), looked.error


def _times(costs: Costs) -> list[float]:
    return [
        sum(each) for each in zip(costs.times['F'], costs.times['B'], costs.times['W'], strict=True)
    ]


def _said(layout: str, costs: Costs) -> str:
    times = ', '.join(f'{1e3 * time:.0f}' for time in _times(costs))
    p = costs.num_stages
    shards = {kind: fmean(own[-p:]) for kind, own in costs.times.items() if len(own) > p}
    told = ''.join(f', {kind} {1e3 * time:.1f}' for kind, time in shards.items() if time)
    return f'measured stages {layout}: {times} ms{told}'
