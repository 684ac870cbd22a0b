"""`zbpp profile`: a file of layers, from a model's shape or from measured times of stages."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import docstring_parser

from megatron_zbpp.cli import values
from megatron_zbpp.cli.arguments import add_renamed, flag
from megatron_zbpp.cli.printing import print_json, print_table, write
from megatron_zbpp.ir import B, F, Placement, W, files
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import ROUTES
from megatron_zbpp.ir.plan_costs import stages_file
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.shapes import MODELS, OWN_FIELDS, Shape, attention_of, layers_of
from megatron_zbpp.partitioning.times.sources import read_times
from megatron_zbpp.partitioning.times.stage_times import Measured
from megatron_zbpp.render.scene import number

# Fields of `Shape`: all but the model have an option.
SIZES = tuple(each for each in fields(Shape) if each.name != 'model')


def option(name: str) -> str:
    """Return the option for a field of `Shape`."""
    return '--num-layers' if name == 'layers' else '--' + name.replace('_', '-')


def add_sizes(command: ArgumentParser, without: Collection[str] = ()) -> None:
    """Add --model and an option for each field of `Shape`, but for some of them."""
    command.add_argument('--model', choices=MODELS, help='costs from its shape, by FLOPs')
    params = docstring_parser.parse(Shape.__doc__ or '').params
    said = {param.arg_name: param.description or '' for param in params}
    for each in SIZES:
        if each.name in without:
            continue
        kind = {'int': values.count, 'float': values.amount, 'str': str}[str(each.type)]
        kind = values.layers if each.name == 'layers' else kind
        default = 'needed' if each.default is MISSING else f'default {each.default}'
        meaning = ' '.join(said[each.name].split()).rstrip('.')
        common = {
            'type': kind,
            'metavar': 'TEXT' if kind is str else 'N',
            'help': f'{meaning}; {default}' if each.default != '' else meaning,
        }
        if each.name == 'layers':
            add_renamed(command, option('layers'), '--layers', 'layers', **common)
        else:
            command.add_argument(option(each.name), **common)


def add_profile(command: ArgumentParser) -> None:
    """Add what `zbpp profile` takes: the fields of `Shape`, or measured stages."""
    command.add_argument(
        'files',
        nargs='*',
        type=values.path,
        metavar='FILE',
        help='measured: a folder of --pipeline-trace-dir; traces of torch.profiler, of all ranks; '
        "a log with Megatron's timers; an sqlite export of Nsight Systems",
    )
    add_sizes(command)
    command.add_argument(
        '--stages',
        nargs='+',
        metavar='LAYOUT=FILE',
        help='measured: a layout such as Ett|ttL, and the times of its stages as for --times',
    )
    command.add_argument(
        '--layout',
        metavar='LAYOUT',
        help='of FILE, where it does not tell: layers of the stages in model order, as Ett|ttL',
    )
    command.add_argument(
        '--weight-share',
        type=values.share,
        metavar='X',
        help='of FILE, where B and W were measured as one backward: share of W, 0 to 1; default '
        '0.5',
    )
    command.add_argument(
        '--microbatches',
        type=values.count,
        metavar='M',
        help='of FILE, a log that does not tell: microbatches of an iteration',
    )
    command.add_argument('--constant', action='store_true', help='fit a fixed time for each stage')
    command.add_argument(
        '-o', '--output', type=values.path, metavar='FILE', help='the file of layers to write'
    )
    command.add_argument(
        '--write-times',
        type=values.path,
        metavar='FILE',
        help='of measured FILEs: the file of their stages to write, for --times of plan, simulate '
        'and others',
    )
    command.add_argument(
        '--write-devices',
        type=values.path,
        metavar='FILE',
        help='measured, of one stage a rank: the file of devices to write, with factors of '
        'ranks that take longer for the same layers, and what messages took',
    )


def profile(args: Namespace) -> None:
    """Print the layers' costs, and write the file."""
    if sum(map(bool, (args.model, args.stages, args.files))) != 1:
        raise ValueError(
            'give --model and its shape, or files with measured times, or --stages: one of them'
        )
    if args.model and (args.constant or args.write_devices):
        unread = '--constant' if args.constant else '--write-devices'
        raise ValueError(f'{unread} is about --stages: leave it out')
    for name in ('layout', 'weight_share', 'microbatches', 'write_times'):
        if not args.files and getattr(args, name) is not None:
            raise ValueError(f'{flag(name)} is about measured files: leave it out, or give one')
    for each in SIZES:
        if not args.model and getattr(args, each.name) is not None:
            raise ValueError(f'{option(each.name)} is about --model: leave it out, or give --model')
    notes: list[str] = []
    devices = times = None
    if args.model:
        shape = shape_of(vars(args))
        made, share = layers_of(shape), attention_of(shape).share
        if share:
            told = f'attention over pairs of tokens: {share:.3g} of F, --attention of zbpp plan'
            notes.append(told)
    else:
        if args.stages:
            measured = [_measured(text) for text in args.stages]
        else:
            times = read_times(
                args.files, args.layout, args.microbatches, args.weight_share, _require_layers
            )
            measured, notes = [times], [*times.notes]
            if times.joined and (args.write_times or args.write_devices):
                raise ValueError(
                    '--write-times and --write-devices need the times of each stage, and timers '
                    'tell those of a rank, all of its chunks together: give a trace instead, or '
                    'leave them out'
                )
        factors = None
        if args.write_devices:
            own, placement = _one_run(measured)
            devices = measured_devices(own.layout.split('|'), placement, own.costs)
            route = placement.only_route
            factors = [devices.devices[rank].factors[0] for rank in route]
        made, error = fit_layers(
            [(each.layout, each.costs) for each in measured], args.constant, factors
        )
        notes.append(f'largest error of a stage: {error:.1%}')
    if devices is not None:
        write(args.write_devices, devices.to_json())
    if args.write_times:
        assert times is not None, 'files were measured'
        write(args.write_times, stages_file(times.costs, times.layout, times.routes))
    if args.output:
        write(args.output, made.to_json())
    if args.json:
        note = '; '.join(notes)
        return print_json({'layers': len(made), 'layout': made.text((len(made),)), 'note': note})
    if times is not None:
        _print_stages(times)
    _print(made, notes)
    for file in filter(None, (args.output, args.write_times, args.write_devices)):
        print(f'wrote {file}')


def shape_of(options: Mapping[str, Any]) -> Shape:
    """Return the shape that options give.

    Raises:
        ValueError: a size is missing, or is of another model.
    """
    model = options['model']
    for name, models in OWN_FIELDS.items():
        if options.get(name) is not None and model not in models:
            raise ValueError(
                f'{option(name)} is about --model {" or ".join(models)}, not {model}: leave it out'
            )
    found = {each.name: options.get(each.name) for each in fields(Shape)}
    given = {name: value for name, value in found.items() if value is not None}
    if model == 'hybrid':
        given.setdefault(
            'layers', len((options['pattern'] or '').partition('/')[0].replace('|', ''))
        )
    missing = [
        option(each.name)
        for each in fields(Shape)
        if each.default is MISSING and each.name not in given
    ]
    if missing:
        raise ValueError(f'--model {model} needs {", ".join(missing)}')
    return Shape(**given)


def _one_run(measured: Sequence[Measured]) -> tuple[Measured, Placement]:
    if len(measured) > 1:
        raise ValueError('--write-devices is about the ranks of one run: give one --stages')
    (own,) = measured
    if len(own.routes) > 1:
        raise ValueError(
            '--write-devices: these stages ran on two ranks each, and their times are of both: '
            'give those of a schedule with one copy of the weights, such as zb-v'
        )
    known = Placement(own.routes[0]) if own.routes else Placement.loop(own.costs.num_stages)
    return own, known


def _measured(text: str) -> Measured:
    layout, equals, path = text.partition('=')
    if not (equals and path.strip()):
        raise ValueError(f'--stages {text}: give LAYOUT=FILE, such as Ett|ttL=times.json')

    def parse(content: str) -> Measured:
        try:
            costs = Costs.from_json(content)
            _require_layers(costs)
        except ValueError as error:
            raise ValueError(
                f'{error}: give times of the stages as {{"F": [...], "B": [...], "W": [...]}}, '
                'such as stages.json of --pipeline-trace-dir'
            ) from error
        routes = tuple(tuple(route) for route in json.loads(content).get(ROUTES, ()))
        return Measured(layout, costs, routes=routes)

    return files.read(path, parse, 'a file of times of stages, as JSON or YAML')


def _require_layers(costs: Costs) -> None:
    """Raise ValueError if costs say anything that no layer has."""
    given = {
        'speeds': costs.speeds,
        'together': costs.together != 1,
        'pairs': costs.pairs,
        'times': costs.times.keys() - {F, B, W},
        'amounts': costs.amounts.keys() - {'activation', 'retained'},
    }
    for name, told in given.items():
        if told:
            raise ValueError(f'{name} say nothing of layers')


def _print_stages(found: Measured) -> None:
    rows = [
        (stage, layers, *(number(1e3 * found.costs.times[kind][stage]) for kind in (F, B, W)))
        for stage, layers in enumerate(found.layout.split('|'))
    ]
    name = 'rank' if found.joined else 'stage'
    print_table((name, 'layers', 'F ms', 'B ms', 'W ms'), rows)
    if found.costs.comm:
        print(f'message between ranks: {number(1e3 * found.costs.comm)} ms, the shortest seen')


def _print(made: Layers, notes: Sequence[str]) -> None:
    rows: list[tuple[object, ...]] = []
    seen: set[object] = set()
    for layer in made:
        if layer not in seen:
            seen.add(layer)
            count = sum(other == layer for other in made)
            times = map(number, (layer.forward, layer.backward, layer.weight))
            rows.append((layer.kind, count, *times, number(layer.activation)))
    print_table(('kind', 'count', 'F', 'B', 'W', 'activation'), rows)
    for note in notes:
        print(note)
