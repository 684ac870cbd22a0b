"""What is known of the layers and ranks before anything is planned: given, or measured on a GPT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.partition import measured
from benchmarks.partition.cases import Known, worst
from benchmarks.partition.place import Place
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


def _times(costs: Costs) -> list[float]:
    return [
        sum(each) for each in zip(costs.times['F'], costs.times['B'], costs.times['W'], strict=True)
    ]


def _said(layout: str, costs: Costs) -> str:
    times = ', '.join(f'{1e3 * time:.0f}' for time in _times(costs))
    return f'measured stages {layout}: {times} ms'
