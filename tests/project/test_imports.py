"""What is imported when: what a training does not ask for is not loaded."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys

import pytest
from commands import run
from paths import ROOT

import megatron_zbpp
from megatron_zbpp import build
from megatron_zbpp.schedules import find, registry
from megatron_zbpp.techniques.composition import techniques_of

pytestmark = pytest.mark.each_release

# Prints which modules of ours a fresh process has once it has run the line.
LOADED = """
import sys
{}
print(*(name for name in sys.modules if name.startswith('megatron_zbpp.')))
"""

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec('megatron') is None, reason='megatron-core is not installed'
)


def loaded(line: str) -> set[str]:
    """Return the modules of the package that a fresh process imports for a line, without `ours.`"""
    done = run([sys.executable, '-W', 'ignore', '-c', LOADED.format(line)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {name.removeprefix('megatron_zbpp.') for name in done.stdout.splitlines()[-1].split()}


def rooms(modules: set[str]) -> set[str]:
    return {name.partition('.')[0] for name in modules}


def test_little_is_imported_before_it_is_read():
    assert rooms(loaded('import megatron_zbpp')) == {'version'}
    # so that `zbpp --help`, `help(enable)` and the docs show them wherever they are read
    none = "sys.modules |= dict.fromkeys(('torch', 'megatron', 'numpy'))"
    flags = 'from megatron_zbpp.launch import flags'
    assert 'mcore.settings' in loaded(f'{none}; {flags}; from megatron_zbpp import cli, enable')
    assert 'planner.plans' in loaded('from megatron_zbpp import plan')
    assert 'simulate' in dir(megatron_zbpp)
    with pytest.raises(AttributeError, match="'megatron_zbpp' has no attribute 'simulated'"):
        getattr(megatron_zbpp, 'simulated')  # noqa: B009


ENABLED = """from megatron_zbpp.emulation import cpu
cpu.install()
import megatron_zbpp
plugin = megatron_zbpp.enable({})"""
# What a training by name has no use for; each is there for those that ask for it.
SEARCHES = {'planner', 'partitioning', 'render', 'cli'}
GUESTS = {'', 'base'}


def guests(modules: set[str]) -> set[str]:
    return {f'{name}.'.split('.')[1] for name in modules if name.partition('.')[0] == 'guests'}


@needs_megatron
def test_a_training_loads_no_search_no_picture_and_no_guest():
    modules = loaded(ENABLED.format("'zb-h1'"))
    assert not rooms(modules) & SEARCHES
    assert guests(modules) == GUESTS
    assert families(modules) == {'catalogue.recommended'}, 'the order is made with the model'
    idle = {'techniques.offload', 'techniques.recompute', 'runtime.activations.store'}
    assert not modules & idle, 'nothing is offloaded, and nothing runs again'
    guards = {name for name in modules if name.startswith('runtime.guard.')}
    assert guards == {'runtime.guard.agreement'}, 'nothing is watched'
    divided = {name for name in modules if 'vocabulary' in name or name == 'runtime.collectives'}
    assert not divided, 'the output layer is whole'


@needs_megatron
def test_a_session_needs_little_of_the_house():
    """A value: of the room that knows Megatron only what was asked for, and its programs."""
    modules = loaded('import megatron_zbpp.mcore.session')
    assert not rooms(modules) & SEARCHES and not families(modules)
    assert {name for name in modules if name.startswith('mcore.')} == {
        *(f'mcore.{name}' for name in ('faces', 'lowered', 'model_settings')),
        *(f'mcore.{name}' for name in ('options', 'programs', 'session', 'settings')),
    }


@needs_megatron
@pytest.mark.parametrize(
    ('asked', 'guest', 'searches'),
    [
        ("'auto'", {'auto_plan', 'background_search', 'measurements'}, {'planner', 'partitioning'}),
        ("'zb-h1', offload='auto'", {'measurements'}, set()),
        ("'zb-h1', trace_dir='no/such/folder'", {'tracing'}, {'render'}),
        ("'zb-h1').side_task(None, 1.0", {'side_work'}, set()),
    ],
    ids=['auto', 'offload auto', 'trace_dir', 'side task'],
)
def test_a_guest_that_is_asked_for_comes_alone(asked, guest, searches):
    modules = loaded(ENABLED.format(asked))
    assert guests(modules) == GUESTS | guest
    assert rooms(modules) & SEARCHES == searches


TABLES = {f'catalogue.{tier}' for tier in registry.TIERS}
PAPERS = {'catalogue.papers'}
FOLDERS = {'sliced': 'slices', 'split_vocabulary': 'vocabulary', 'updating': 'updates'}


def families(modules: set[str]) -> set[str]:
    orders = {row.order.partition(':')[0] for row in registry.own_families(every=True)}
    return {name.removeprefix('schedules.') for name in modules} & (orders | TABLES)


# Evictions are transfers as those of offload, whose room has PipeOffload's orders, and of slices.
EVICTION = {f'techniques.{name}' for name in ('evict', 'offload', 'slices.place')}
EVICTION |= {'loops', 'zero_bubble'}


@pytest.mark.parametrize(
    ('line', 'made_by'),
    [
        ("build('zb-h1', 2, 4)", {'zero_bubble', 'catalogue.recommended'}),
        ("build('ZB_h1', 2, 4)", {'zero_bubble', 'catalogue.recommended'}),
        ("build('gpipe', 2, 4)", {'whole_backwards', 'catalogue.recommended', 'catalogue.more'}),
        ("build('bpipe', 2, 4)", {'whole_backwards', *EVICTION, *TABLES - PAPERS}),
        ("build('ZBVPP', 2, 4)", {'zero_bubble', *TABLES}),  # an alias
        ('FAMILIES', TABLES),
    ],
)
def test_a_schedule_is_made_by_its_own_module(line, made_by):
    code = f'from megatron_zbpp import schedules as s; s.{line}'
    assert families(loaded(code)) == made_by


def test_each_row_says_what_its_order_is():
    """Options, chunks, placement and techniques are known before a schedule is made."""
    for each in registry.own_families(every=True):
        parameters = inspect.signature(each.generate).parameters
        assert each.options == tuple(name for name in registry._OPTIONS if name in parameters)
        defaults = {'num_chunks': each.default_chunks, 'num_slices': each.default_slices}
        for name in defaults.keys() & parameters.keys():
            assert parameters[name].default == defaults[name], each.name
        assert 'num_chunks' in parameters or each.default_chunks == each.chunks.start
        schedule = build(each.name, 4, 8)
        shapes = {each.placement} | ({'v'} if each.placement == 'wave' else set())
        assert schedule.placement.name in shapes, each.name
        folders = {FOLDERS.get(name, name) for name in techniques_of(schedule)}
        two_way = set() if schedule.placement.is_one_way else {'two_way'}
        assert folders | two_way == {*each.techniques}, each.name
    for tier in registry.TIERS:
        table = importlib.import_module(f'megatron_zbpp.schedules.catalogue.{tier}')
        names = [name for of, names in registry._INDEX for name in names if of == tier]
        assert [row.name for row in table.ROWS] == names
        assert all(find(name).tier == tier for name in names)


NAMED = re.compile(r"'((?:megatron_zbpp\.)?[a-z_]+(?:\.[a-z_]+)+:[a-z_]+)'")


def functions_named_by_text():
    for file in sorted((ROOT / 'megatron_zbpp').rglob('*.py')):
        names = {*NAMED.findall(file.read_text())} - {'package.module:name'}  # an example
        for name in sorted(names):
            yield pytest.param(file, name, id=name)


@pytest.mark.parametrize(('file', 'name'), functions_named_by_text())
def test_a_function_that_is_named_by_a_text_is_there(file, name):
    """From the package down, or from the module's own room."""
    whole = name.removeprefix('megatron_zbpp.')
    of_package = (ROOT / 'megatron_zbpp' / whole.partition('.')[0]).exists()
    room = '.'.join(file.parent.relative_to(ROOT).parts)
    place = f'{"megatron_zbpp" if of_package else room}.{whole}'
    assert callable(pkgutil.resolve_name(place))


# ---- What `megatron_zbpp` exports: all of it there, documented, and enough for the examples.


EXAMPLES = sorted((ROOT / 'examples' / 'gpt').glob('*.py'))


@pytest.mark.parametrize('name', megatron_zbpp.__all__)
def test_each_name_is_documented(name):
    value = getattr(megatron_zbpp, name)
    if callable(value):
        assert inspect.getdoc(value), name
        annotated = inspect.signature(value).return_annotation is not inspect.Signature.empty
        assert inspect.isclass(value) or annotated, name


def test_a_name_of_ours_is_public_or_private():
    own = {
        name
        for name, value in vars(megatron_zbpp).items()
        if inspect.getmodule(value) is megatron_zbpp and not name.startswith('_')
    }
    assert own <= set(megatron_zbpp.__all__)


@pytest.mark.parametrize('file', EXAMPLES, ids=lambda file: file.name)
def test_examples_need_nothing_else(file):
    """But for the types of what they are given."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    modules = [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    assert {m for m in modules if m and m.startswith('megatron_zbpp')} <= {'megatron_zbpp'}
    read = [ast.unparse(n).split('.') for n in nodes if isinstance(n, ast.Attribute)]
    used = {words[1] for words in read if words[0] == 'megatron_zbpp'}
    assert used <= set(megatron_zbpp.__all__)


def test_the_small_example_stays_small():
    assert len((ROOT / 'examples/gpt/minimal.py').read_text().splitlines()) <= 120
