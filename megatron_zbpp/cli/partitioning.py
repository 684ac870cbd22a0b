"""`zbpp partition`: which layers on which rank, on which device, by which schedule."""

from __future__ import annotations

import json
import sys
import warnings
from argparse import ArgumentParser, Namespace

from megatron_zbpp.analysis.gain import idle_parts
from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import add_search, flag, load_devices, load_layers
from megatron_zbpp.cli.printing import (
    draw,
    gib,
    headline,
    idle_text,
    picture_format,
    print_json,
    print_reversed,
    print_table,
    print_wrapped,
    searched,
    write,
)
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.formats import BYTES
from megatron_zbpp.ir.timeline import Timeline
from megatron_zbpp.partitioning.devices import Devices
from megatron_zbpp.partitioning.layer_costs import require_bytes
from megatron_zbpp.partitioning.layers import KINDS, Layers
from megatron_zbpp.partitioning.plans import (
    PartitionInterrupted,
    PartitionPlan,
    default_placements,
    partition,
    partition_by,
)
from megatron_zbpp.partitioning.space import OBJECTIVES, Space
from megatron_zbpp.partitioning.strategies.by_name import ORDERING, STRATEGIES
from megatron_zbpp.planner.cases import Case
from megatron_zbpp.planner.limits import Bytes, Limit
from megatron_zbpp.render.scene import number


def add_partition(command: ArgumentParser) -> None:
    """Add what `zbpp partition` takes."""
    add_case(command)
    add_search(command, OBJECTIVES, 60.0)
    command.add_argument(
        '--fused', action='store_true', help='B and W are one pass: 1F1B and its like'
    )
    command.add_argument(
        '--schedules',
        type=values.names,
        default=[],
        metavar='NAME,...',
        help='only these, as they are; default: the best is planned',
    )
    command.add_argument(
        '--strategy',
        choices=tuple(STRATEGIES),
        help='partition as that planner does, for comparison; default: our search',
    )
    command.add_argument('--exact', action='store_true', help='until the best is proven')
    command.add_argument(
        '--top', type=values.count, default=32, metavar='K', help='partitions that are planned for'
    )


def add_case(command: ArgumentParser) -> None:
    """Add layers, devices, microbatches and what limits them."""
    command.add_argument(
        'layers', type=values.path, metavar='LAYERS', help='costs of the layers, JSON'
    )
    command.add_argument(
        '--devices', type=values.path, metavar='FILE', help='factors, memory and links, JSON'
    )
    command.add_argument('--pp', type=values.ranks, metavar='P', help='ranks; default: --devices')
    command.add_argument(
        '--microbatches',
        type=values.count,
        metavar='M',
        required=True,
        help='microbatches; of --strategy 2bw: samples of a batch',
    )
    command.add_argument(
        '--placements',
        metavar='NAME,...',
        help='that may be used, all of one way: loop, loop2, v, wave4, ...; default loop,v,loop2',
    )
    command.add_argument(
        '--memory-limit',
        type=values.memories,
        metavar='A,...',
        help='most memory of a rank, or of each device, activations and parameters, in the unit of '
        'the file of layers; or in bytes, such as 60GiB, where that unit is bytes',
    )
    command.add_argument(
        '--keep-order', action='store_true', help='device r is rank r; default: the best order'
    )


def _require_work(layers: Layers) -> None:
    if not any(layer.time for layer in layers):
        raise ValueError('no layer takes time: give F, B and W above 0 for some, zbpp profile does')
    unknown = sorted({layer.kind for layer in layers} - KINDS)
    if unknown:
        warnings.warn(
            f'kinds {", ".join(unknown)}: layouts of Megatron know E, t, m and L, of hybrid models '
            f'{", ".join(sorted(KINDS - set("EtmL")))}: this plan is for comparison only',
            stacklevel=2,
        )


def placements_of(text: str | None, layers: Layers, ranks: int) -> list[Placement]:
    """Return the placements that are named: loop, v, wave, with the chunks of a rank behind."""
    if text is None:
        return default_placements(layers, ranks)
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


def partition_layers(args: Namespace) -> int:
    """Return 0, or 130 where Ctrl-C ended the search; prints and writes the best plan."""
    layers = load_layers(args.layers)
    _require_work(layers)
    devices = load_devices(args.devices, args.pp)
    limit = limit_of(args.memory_limit, layers, args.layers)
    picture, status = picture_format(args.output, args.title, 'the plan'), 0
    asked = {'objective': args.objective, 'fused': args.fused, 'keep_order': args.keep_order}
    if args.strategy:
        own = 'it has one chunk a rank, and stages of its own'
        ignored = {'placements': own, 'schedules': own, 'exact': own}
        if args.strategy in ORDERING:
            ignored['keep_order'] = 'it chooses the order'
        for name, why in ignored.items():
            if getattr(args, name):
                raise ValueError(
                    f'--strategy {args.strategy} takes no {flag(name)}: {why}; leave out one of '
                    'the two'
                )
        loop = [Placement.loop(len(devices))]
        space = Space.of(layers, devices, args.microbatches, loop, limit, **asked)
        found, said = partition_by(args.strategy, space)
        print(said, file=sys.stderr if args.json else sys.stdout)
    else:
        found, status = searched(
            'partitioning',
            'this is the best partition',
            lambda done: partition(
                layers,
                devices,
                args.microbatches,
                placements=placements_of(args.placements, layers, len(devices)),
                memory_limit=limit,
                schedules=args.schedules,
                exact=args.exact,
                seconds=args.seconds,
                top=args.top,
                seed=args.seed,
                progress=done,
                **asked,
            ),
            lambda e: e.best if isinstance(e, PartitionInterrupted) else None,
        )
    made = found.facts(layers, devices)
    if picture is not None:
        case = Case(found.schedule, found.costs, found.units)
        draw(args.output, picture, args.title, {found.layout: case}, 'predicted')
    elif args.output:
        write(args.output, json.dumps(made, indent=1))
    if args.json:
        print_json(made)
        return status
    _print(found, devices, bool(args.memory_limit))
    if args.output:
        print(f'wrote {args.output}')
    return status


def _print(found: PartitionPlan, devices: Devices, limited: bool) -> None:
    """Print a plan for people: where everything is, and how good that is."""
    timeline = found.timeline
    print(headline(found.schedule))
    print(f'layout {found.layout}')
    print(
        f'makespan {number(timeline.makespan)}, '
        f'{idle_text(timeline.idle_all_ranks, idle_parts(timeline, found.costs)._asdict())}'
    )
    print(f'window {number(max(timeline.windows))}, bubble {timeline.bubble:.2%}')
    print(
        f'{found.objective} {number(found.value)}, lower bound of all partitions '
        f'{number(found.lower_bound)}, gap {found.gap:.2%}'
    )
    _print_gain(found, limited)
    if not found.repeats:
        print_wrapped(
            'the clock or Ctrl-C ended the search: another run may find another plan, up to '
            f'{1 - found.lower_bound / found.value if found.value else 0.0:.1%} faster; with more '
            '--seconds it searches longer'
        )
    _print_ranks(found, timeline, devices)
    print_reversed(found.schedule.placement)


def _print_gain(found: PartitionPlan, limited: bool) -> None:
    if found.even is None or found.even_peak is None:
        print('the even split with 1F1B does not fit')
        return
    gain = 1 - found.value / found.even if found.even else 0.0
    most, alone = max(found.peak_activations), found.even_peak
    held = f', and holds {most / alone:.1f} times its activations' if most > alone > 0 else ''
    limit = ': --memory-limit bounds them' if held and not limited else ''
    even = f'even split with 1f1b: {number(found.even)}; this takes {gain:.1%} less'
    print_wrapped(f'{even}{held}{limit}')


def _print_ranks(found: PartitionPlan, timeline: Timeline, devices: Devices) -> None:
    """Print a line a rank: its device, layers, work and memory."""
    held, peaks = found.layout.split('|'), found.peak_activations
    amount = gib if found.units.memory == BYTES else number
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
