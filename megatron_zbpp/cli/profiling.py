"""`zbpp profile`: a file of layers, from a model's shape or from measured times of stages."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from megatron_zbpp.cli.arguments import add_options, flag
from megatron_zbpp.cli.printing import print_json, print_table, write
from megatron_zbpp.ir import B, F, Placement, W, files
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import ROUTES
from megatron_zbpp.ir.plan_costs import stages_file
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.measured_files import read_times
from megatron_zbpp.partitioning.recordings import Measured
from megatron_zbpp.partitioning.shapes import MODELS, OWN_FIELDS, Shape, attention_of, layers_of
from megatron_zbpp.render.scene import number

# Fields of `Shape`: all but the model have an option.
SIZES = tuple(each for each in fields(Shape) if each.name != 'model')


def option(name: str) -> str:
    """Return the option for a field of `Shape`."""
    return '--num-layers' if name == 'layers' else '--' + name.replace('_', '-')


def add_sizes(command: ArgumentParser, without: Collection[str] = ()) -> None:
    """Add --model and an option for each field of `Shape`, but for some of them."""
    command.add_argument('--model', choices=MODELS, help='costs from its shape, by FLOPs')
    hints = get_type_hints(Shape, include_extras=True)
    for each in SIZES:
        if each.name in without:
            continue
        read, text = get_args(hints[each.name])
        kind = {int: 'count', float: 'amount', str: 'text'}[read]
        if each.default != '':
            text += '; needed' if each.default is MISSING else f'; default {each.default}'
        row = f'{option(each.name)} {"TEXT" if kind == "text" else "N"}  {kind}  {text}'
        if each.name == 'layers':
            row = f'--num-layers (--layers) N  layers as layers  {text}'
        add_options(command, row)


def add_profile(command: ArgumentParser) -> None:
    """Add the arguments of `zbpp profile`: the fields of `Shape`, or measured stages."""
    add_options(
        command,
        """
        files FILE  path*  measured: a folder of --pipeline-trace-dir; traces of torch.profiler, of
            all ranks; a log with Megatron's timers; an sqlite export of Nsight Systems
        """,
    )
    add_sizes(command)
    add_options(
        command,
        """
        --stages LAYOUT=FILE  text+  measured: a layout such as Ett|ttL, and the times of its stages
            as for --times
        --layout LAYOUT  text  of FILE, where it does not tell: layers of the stages in model order,
            as Ett|ttL
        --weight-share X  share  of FILE, where B and W were measured as one backward: share of W, 0
            to 1; default 0.5
        --microbatches M  count  of FILE, a log that does not tell: microbatches of an iteration
        --constant  switch  fit a fixed time for each stage
        -o --output FILE  path  the file of layers to write
        --write-times FILE  path  of measured FILEs: the file of their stages to write, for --times
            of plan, simulate and others
        --write-devices FILE  path  measured, of one stage a rank: the file of devices to write,
            with factors of ranks that take longer for the same layers, and what messages took
        """,
    )


def profile(
    files: list[str],
    model: str | None,
    stages: list[str] | None,
    output: str | None,
    write_times: str | None,
    write_devices: str | None,
    constant: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Print the layers' costs, and write the file."""
    if sum(map(bool, (model, stages, files))) != 1:
        raise ValueError(
            'give --model and its shape, or files with measured times, or --stages: one of them'
        )
    if model and (constant or write_devices):
        unread = '--constant' if constant else '--write-devices'
        raise ValueError(f'{unread} is about --stages: leave it out')
    of_files = {name: options[name] for name in ('layout', 'weight_share', 'microbatches')}
    for name, value in {**of_files, 'write_times': write_times}.items():
        if not files and value is not None:
            raise ValueError(f'{flag(name)} is about measured files: leave it out, or give one')
    for each in SIZES:
        if not model and options[each.name] is not None:
            raise ValueError(f'{option(each.name)} is about --model: leave it out, or give --model')
    notes: list[str] = []
    devices = times = None
    if model:
        shape = shape_of({**options, 'model': model})
        made, share = layers_of(shape), attention_of(shape).share
        if share:
            told = f'attention over pairs of tokens: {share:.3g} of F, --attention of zbpp plan'
            notes.append(told)
    else:
        if stages:
            measured = [_measured(text) for text in stages]
        else:
            times = read_times(files, require=_require_layers, **of_files)
            measured, notes = [times], [*times.notes]
            if times.joined and (write_times or write_devices):
                raise ValueError(
                    '--write-times and --write-devices need the times of each stage, and timers '
                    'tell those of a rank, all of its chunks together: give a trace instead, or '
                    'leave them out'
                )
        factors = None
        if write_devices:
            if len(measured) > 1:
                raise ValueError('--write-devices is about the ranks of one run: give one --stages')
            (own,) = measured
            if len(own.routes) > 1:
                raise ValueError(
                    '--write-devices: these stages ran on two ranks each, and their times are of '
                    'both: give those of a schedule with one copy of the weights, such as zb-v'
                )
            loop = Placement.loop(own.costs.num_stages)
            placement = Placement(own.routes[0]) if own.routes else loop
            devices = measured_devices(own.layout.split('|'), placement, own.costs)
            factors = [devices.devices[rank].factors[0] for rank in placement.only_route]
        layouts = [(each.layout, each.costs) for each in measured]
        made, error = fit_layers(layouts, constant, factors)
        notes.append(f'largest error of a stage: {error:.1%}')
    if write_devices and devices is not None:
        write(write_devices, devices.to_json())
    if write_times:
        assert times is not None, 'files were measured'
        write(write_times, stages_file(times.costs, times.layout, times.routes))
    if output:
        write(output, made.to_json())
    if as_json:
        note = '; '.join(notes)
        return print_json({'layers': len(made), 'layout': made.text((len(made),)), 'note': note})
    if times is not None:
        of = times.costs.times
        rows = [
            (stage, layers, *(number(1e3 * of[kind][stage]) for kind in (F, B, W)))
            for stage, layers in enumerate(times.layout.split('|'))
        ]
        print_table(('rank' if times.joined else 'stage', 'layers', 'F ms', 'B ms', 'W ms'), rows)
        if times.costs.comm:
            print(f'message between ranks: {number(1e3 * times.costs.comm)} ms, the shortest seen')
    _print(made, notes)
    for file in filter(None, (output, write_times, write_devices)):
        print(f'wrote {file}')


def shape_of(options: Mapping[str, Any]) -> Shape:
    """Return the shape that options give."""
    model = options['model']
    for name, models in OWN_FIELDS.items():
        if options.get(name) is not None and model not in models:
            raise ValueError(
                f'{option(name)} is about --model {" or ".join(models)}, not {model}: leave it out'
            )
    names = (each.name for each in fields(Shape))
    given = {name: value for name in names if (value := options.get(name)) is not None}
    if model == 'hybrid':
        main = (options['pattern'] or '').partition('/')[0]
        given.setdefault('layers', len(main.replace('|', '')))
    needed = (each.name for each in fields(Shape) if each.default is MISSING)
    missing = [option(name) for name in needed if name not in given]
    if missing:
        raise ValueError(f'--model {model} needs {", ".join(missing)}')
    return Shape(**given)


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


def _print(made: Layers, notes: Sequence[str]) -> None:
    rows: list[tuple[object, ...]] = []
    for layer, count in Counter(made).items():
        amounts = layer.forward, layer.backward, layer.weight, layer.activation
        rows.append((layer.kind, count, *map(number, amounts)))
    print_table(('kind', 'count', 'F', 'B', 'W', 'activation'), rows)
    for note in notes:
        print(note)
