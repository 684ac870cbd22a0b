"""What users read of values in Python and in files that cannot be: it changes on purpose only.

`refused_values.json` has expressions, each with its message, which begins with the error's type if
that is no ValueError. After an intended change write it anew and read what differs as a user would,
who sees the value that is wrong and the cure:

    PYTHONPATH=tests/support python tests/unit/cli/test_refused_values.py
"""

import json
from dataclasses import asdict, replace
from importlib import import_module
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from orders import by_hand
from own_families import only_own
from stays import golden

import megatron_zbpp
from megatron_zbpp import Costs, Layer, Layers, Pass, Placement, Schedule, build, check
from megatron_zbpp.ir import formats, strict_json
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.partitioning.setup_costs import Job, Setup
from megatron_zbpp.partitioning.setup_prediction import predict
from megatron_zbpp.partitioning.shapes import Shape
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.planner.plans import plan
from megatron_zbpp.schedules.construct import building_blocks

# whose names expressions may have, beside those of the package itself and of this file
MODULES = """
ir.formats ir.strict_json analysis.run_ahead schedules.construct.draft techniques.offload
techniques.recompute techniques.slices.balance techniques.slices.graph techniques.slices.place
techniques.two_way techniques.updates.calls techniques.updates.versions techniques.vocabulary.place
guests.auto_plan partitioning.advice partitioning.freeze_plans partitioning.space
render.planner_page mcore.settings planner.ends launch partitioning.strategies
""".split()
LOOP, ONES = Placement.loop(2), (1.0, 1.0)
SHAPE = Shape('gpt', 2, hidden=64, heads=4, vocab=1000, seq=32, tflops=1e-12)
MOE = Shape('moe', 8, 2048, 16, 51200, 2048, 245.0, groups=8, experts=8, expert_ffn=1024)
FREEZING = FreezePlan(build('zb-h1', 2, 4), (), 7.0, 9.0)
LAYERS = Layers((Layer('E', 1.0, 0.0, 1.0), *[Layer('t', 2.0, 2.0, 2.0)] * 7))


def load_bytes(content: bytes, name: str = 'mine') -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            formats.load(path)
        except ValueError as error:
            raise ValueError(str(error).replace(folder, 'FOLDER')) from error


def load_text(text: str) -> None:
    """Read a file of this text; its name and the message are in one line."""
    try:
        load_bytes(text.encode(), 'bad.csv')
    except ValueError as error:
        name = 'FOLDER/bad.csv: '
        assert str(error).startswith(name) and '\n' not in str(error)
        raise ValueError(str(error).removeprefix(name)) from error


def schedule(old: str, new: str) -> None:
    """Read the file of a schedule of which a part is another."""
    text = json.dumps(json.loads(build('1f1b', 2, 2).to_json()), ensure_ascii=False)
    assert old in text
    Schedule.from_json(text.replace(old, new, 1))


def two_stages(**others: object) -> Costs:
    given = {name: tuple(of) if isinstance(of, list) else of for name, of in others.items()}
    return Costs.of(**{'forward': ONES, 'backward': ONES, 'weight': ONES, **given})


def check_orders(orders: list[str], m: int = 1, chunks: int = 1, limit: float | None = None):
    passes = [map(Pass.parse, order.split()) for order in orders]
    check(Schedule.of('mine', Placement.loop(2, chunks), m, passes), memory_limit=limit)


def setup(**changed: int) -> None:
    """Predict a setup of a job, of which the job says the same."""
    job, setup = Job(MOE, 32, 8, 2.0**35), replace(Setup(), **changed)
    try:
        predict(job, setup)
    except ValueError as error:
        assert job.why_impossible(setup) == str(error)
        raise


def in_file(read, **fields: object) -> object:
    return read(json.dumps(fields))


def plan_named(ranks: int = 2, microbatches: int = 3, **given: object) -> object:
    return megatron_zbpp.plan(ranks, microbatches, **{'seconds': 0.1} | given)


def within(candidates: list, **others: object) -> None:
    """Plan with actions under a limit that one microbatch does not keep."""
    plan_within(candidates, 4, **{'actions': ('offload',), 'memory_limit': 0.1, **others})


NAMES = {name: getattr(megatron_zbpp, name) for name in megatron_zbpp.__all__}
for module in (import_module(f'megatron_zbpp.{module}') for module in MODULES):
    own = vars(module).items()
    NAMES |= {name: value for name, value in own if 'zbpp' in str(getattr(value, '__module__', ''))}
NAMES |= globals() | {
    'partition_of': lambda **given: megatron_zbpp.partition(
        **{'layers': LAYERS, 'devices': 4} | given
    ),
    'shape': lambda **changed: Shape(**asdict(SHAPE) | changed),
    'placement': lambda **given: Placement(**{name: tuple(of) for name, of in given.items()}),
    'plan_two_stages': lambda **given: plan([(LOOP, two_stages())], 4, **given),
    'layers': lambda **file: in_file(Layers.from_json, **file),
    'devices': lambda **file: in_file(megatron_zbpp.Devices.from_json, **file),
    'freezing': lambda **file: in_file(
        FreezePlan.from_json, **json.loads(FREEZING.to_json()) | file
    ),
    'costs': lambda **file: in_file(Costs.from_json, **file),
    'selective_costs': lambda **file: Costs.from_json(json.dumps(file), selective=True),
    **{'formats': formats, 'strict_json': strict_json, 'inf': inf, 'nan': nan},
    **{'megatron_zbpp': megatron_zbpp, 'building_blocks': building_blocks, 'by_hand': by_hand},
}


def message(expression: str) -> str:
    """Return what is said where nobody has registered a schedule of one's own."""
    with only_own(), pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        eval(expression, dict(NAMES))
    kind = '' if isinstance(error.value, ValueError) else f'{type(error.value).__name__}: '
    return f'{kind}{error.value}'


FILE = Path(__file__).with_name('refused_values.json')
EXPRESSIONS = {expression: expression for expression in json.loads(FILE.read_text())}
test_refused_values_stay = golden(__name__, FILE, EXPRESSIONS, message)
