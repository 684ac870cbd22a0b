"""`zbpp partition`: which layers on which rank, on which device, by which schedule."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser
from typing import Any

from megatron_zbpp.analysis.gain import idle_parts
from megatron_zbpp.cli import printing
from megatron_zbpp.cli.arguments import add_options, add_search, flag, load_devices, load_layers
from megatron_zbpp.cli.printing import print_json, print_reversed, print_table, print_wrapped
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.partitioning import plans
from megatron_zbpp.partitioning.layers import KINDS, Devices, Layers
from megatron_zbpp.partitioning.space import OBJECTIVES, Space, require_bytes
from megatron_zbpp.partitioning.strategies import ORDERING, STRATEGIES
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.planner.limits import Bytes, Limit
from megatron_zbpp.render.scene import number


def add_partition(command: ArgumentParser) -> None:
    """Add the arguments of `zbpp partition`."""
    add_options(
        command,
        """
        layers LAYERS  path  costs of the layers, JSON
        --devices FILE  path  factors, memory and links, JSON
        --pp P  ranks  ranks; default: --devices
        --microbatches M  count!  microbatches; of --strategy 2bw: samples of a batch
        --placements NAME,...  text  that may be used, all of one way: loop, loop2, v, wave4, ...;
            default loop,v,loop2
        --memory-limit A,...  memories  most memory of a rank, or of each device, activations and
            parameters, in the unit of the file of layers; or in bytes, such as 60GiB, where that
            unit is bytes
        --keep-order  switch  device r is rank r; default: the best order
        """,
    )
    add_search(command, OBJECTIVES, 60.0)
    add_options(
        command,
        """
        --fused  switch  B and W are one pass: 1F1B and its like
        --schedules NAME,...  names  only these, as they are; default: the best is planned
        --strategy  strategies  partition as that planner does, for comparison; default: our search
        --exact  switch  until the best is proven
        --top K  count = 32  partitions that are planned for
        """,
        strategies=tuple(STRATEGIES),
    )


def placements_of(text: str | None, layers: Layers, ranks: int) -> list[Placement]:
    """Return the placements that are named: loop, v, wave, with the chunks of a rank behind."""
    if text is None:
        return plans.default_placements(layers, ranks)
    found: list[Placement] = []
    for name in text.split(','):
        kind = name.rstrip('0123456789')
        chunks = int(name[len(kind) :] or (2 if kind in ('v', 'wave') else 1))
        if kind == 'loop' and chunks:
            found.append(Placement.loop(ranks, chunks))
        elif (kind == 'wave' and chunks > 1) or (kind, chunks) == ('v', 2):
            found.append(Placement.wave(ranks, chunks))
        else:
            raise ValueError(f'--placements {name}: choose of loop, loop2, ..., v, wave2, ...')
    return found


def limit_of(given: list[float] | None, layers: Layers, file: str) -> Limit:
    """Return the limit of memory: one for all, one a device, or none."""
    given = given or []
    require_bytes(layers, file, given)
    if len({isinstance(limit, Bytes) for limit in given}) > 1:
        raise ValueError('--memory-limit: give all limits in bytes, or all in the unit of the file')
    return given[0] if len(given) == 1 else given or None


def partition_layers(
    layers: str,
    microbatches: int,
    memory_limit: list[float] | None,
    output: str | None,
    title: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Return 0, or 130 where Ctrl-C ended the search; prints and writes the best plan."""
    model = load_layers(layers)
    if not any(layer.time for layer in model):
        raise ValueError('no layer takes time: give F, B and W above 0 for some, zbpp profile does')
    unknown = sorted({layer.kind for layer in model} - KINDS)
    if unknown:
        warnings.warn(
            f'kinds {", ".join(unknown)}: layouts of Megatron know E, t, m and L, of hybrid models '
            f'{", ".join(sorted(KINDS - set("EtmL")))}: this plan is for comparison only',
            stacklevel=2,
        )
    devices = load_devices(options['devices'], options['pp'])
    limit = limit_of(memory_limit, model, layers)
    picture, status = printing.picture_format(output, title, 'the plan'), 0
    asked = {name: options[name] for name in ('objective', 'fused', 'keep_order')}
    if strategy := options['strategy']:
        own = 'it has one chunk a rank, and stages of its own'
        ignored = {'placements': own, 'schedules': own, 'exact': own}
        if strategy in ORDERING:
            ignored['keep_order'] = 'it chooses the order'
        for name, why in ignored.items():
            if options[name]:
                raise ValueError(
                    f'--strategy {strategy} takes no {flag(name)}: {why}; leave out one of the two'
                )
        loop = [Placement.loop(len(devices))]
        found, said = plans.partition_by(
            strategy, Space(model, devices, microbatches, loop, limit, **asked)
        )
        print(said, file=sys.stderr if as_json else sys.stdout)
    else:
        asked |= {name: options[name] for name in ('exact', 'seconds', 'top', 'seed')}
        found, status = printing.searched(
            'partitioning',
            'this is the best partition',
            lambda done: plans.partition(
                model,
                devices,
                microbatches,
                placements=placements_of(options['placements'], model, len(devices)),
                memory_limit=limit,
                schedules=options['schedules'] or [],
                progress=done,
                **asked,
            ),
        )
    made = found.facts(model, devices)
    if output and picture is not None:
        case = Case(found.schedule, found.costs, found.units)
        printing.draw(output, picture, title, {found.layout: case}, 'predicted')
    elif output:
        printing.write(output, json.dumps(made, indent=1))
    if as_json:
        print_json(made)
        return status
    _print(found, devices, bool(memory_limit))
    if output:
        print(f'wrote {output}')
    return status


def _print(found: plans.PartitionPlan, devices: Devices, limited: bool) -> None:
    timeline = found.timeline
    print(printing.headline(found.schedule))
    print(f'layout {found.layout}')
    parts = idle_parts(timeline, found.costs)._asdict()
    idle = printing.idle_text(timeline.idle_all_ranks, parts)
    print(f'makespan {number(timeline.makespan)}, {idle}')
    print(f'window {number(max(timeline.windows))}, bubble {timeline.bubble:.2%}')
    print(
        f'{found.objective} {number(found.value)}, lower bound of all partitions '
        f'{number(found.lower_bound)}, gap {found.gap:.2%}'
    )
    if found.even is None or found.even_peak is None:
        print('the even split with 1F1B does not fit')
    else:
        gain = 1 - found.value / found.even if found.even else 0.0
        most, alone = max(found.peak_activations), found.even_peak
        held = f', and holds {most / alone:.1f} times its activations' if most > alone > 0 else ''
        limit = ': --memory-limit bounds them' if held and not limited else ''
        even = f'even split with 1f1b: {number(found.even)}; this takes {gain:.1%} less'
        print_wrapped(f'{even}{held}{limit}')
    if not found.repeats:
        print_wrapped(
            'the clock or Ctrl-C ended the search: another run may find another plan, up to '
            f'{1 - found.lower_bound / found.value if found.value else 0.0:.1%} faster; with more '
            '--seconds it searches longer'
        )
    held, peaks = found.layout.split('|'), found.peak_activations
    amount = printing.gib if found.units.memory == BYTES else number
    has = any(found.parameters)
    heads = ['rank', 'device', 'layers', 'busy', 'peak activations']
    heads += ['parameters', 'memory'] if has else []
    rows: list[list[object]] = []
    for rank, device in enumerate(found.device_order):
        own = ' '.join(held[stage] for stage in found.schedule.placement.stages(rank))
        name = devices.devices[device].name or str(device)
        most, static = peaks[rank], found.parameters[rank]
        memory = [amount(most), *([amount(static), amount(most + static)] if has else [])]
        rows.append([rank, name, own, number(timeline.busy(rank)), *memory])
    print_table(heads, rows)
    print_reversed(found.schedule.placement)
