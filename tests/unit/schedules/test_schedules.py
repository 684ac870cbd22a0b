"""The registry: names, options, and what every schedule of the library must be."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp import Costs, Placement, Schedule, build, check, simulate
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import BW, B, F, Together, W
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.planner.plans import named
from megatron_zbpp.planner.problem import Problem
from megatron_zbpp.schedules import FAMILIES, family, find, names, registry
from megatron_zbpp.schedules.registry import ANY, ONE

# names that others have, and addresses that lead nowhere, each with what is said of it
NAMED = json.loads(Path(__file__).with_name('names.json').read_text())


@st.composite
def requests(draw: st.DrawFn, most_ranks: int = 6, most_microbatches: int = 15) -> dict:
    """Arguments of `build` that each family must take."""
    family = draw(st.sampled_from(FAMILIES))
    return {
        'name': family.name,
        'num_ranks': draw(st.integers(family.min_ranks, most_ranks)),
        'num_microbatches': draw(st.integers(1, most_microbatches)),
        'num_chunks': draw(st.none() | st.sampled_from(family.chunks[:3])),
    }


@settings(max_examples=200)
@given(requests(), st.data())
def test_every_schedule_may_run(request, data):
    """Passes of a stage come in the order of microbatches; the same is built by any spelling."""
    schedule = build(**request)
    check(schedule)
    p, m = request['num_ranks'], request['num_microbatches']
    assert (schedule.name, schedule.num_ranks) == (request['name'], p)
    assert schedule.num_microbatches == m
    v = request['num_chunks'] or find(request['name']).default_chunks
    assert all(len(schedule.placement.stages(rank)) == v for rank in range(p))
    assert max(peak(schedule, Costs.uniform(schedule.placement))) <= m
    for stage, rank in enumerate(schedule.placement.only_route):
        own = [each for each in schedule.passes[rank] if each.stage == stage]
        for kinds in ((F,), (B, BW), (W, BW)):
            order = [each.microbatch for each in own if each.kind in kinds]
            assert order == list(range(m)), (stage, kinds)
    again = data.draw(st.sampled_from(['lower', 'upper', 'title']))
    name = getattr(request['name'], again)().replace('-', data.draw(st.sampled_from('-_')))
    assert build(**{**request, 'name': name}) == schedule


@pytest.mark.parametrize(('alias', 'name'), NAMED['aliases'].items())
def test_names_of_others(alias, name):
    assert find(alias).name == name


def test_no_name_means_two_families():
    keys = [registry._key(name) for f in FAMILIES for name in (f.name, *f.aliases)]
    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.name)
def test_each_family_says_what_it_is(family):
    text = family.generate.__doc__
    assert 'arXiv' in text and family.tier in registry.TIERS
    assert family.default_chunks in family.chunks
    assert f'>>> print(grid({family.generate.__name__}(' in text
    assert all((family.summary, family.bubble, family.memory, family.source, family.when))
    assert ('num_chunks' in family.options) == (len(family.chunks) > 1)


@pytest.mark.parametrize('name', names())
def test_costs_are_welcome_everywhere(name):
    """Who has one order whatever the times returns it; who adapts still returns one that runs."""
    plain = build(name, 4, 6)
    adapted = build(name, 4, 6, costs=Costs.uniform(plain.placement, 1, 1.4, 0.5, comm=0.1))
    check(adapted)
    if 'costs' not in find(name).options:
        assert adapted == plain


@settings(max_examples=150)
@given(st.sampled_from(['zb-1p', 'zb-2p']), st.integers(1, 6), st.integers(1, 14), st.data())
def test_the_automatic_scheduler_keeps_its_limit(name, p, m, data):
    def stages(least: float, most: float) -> tuple[float, ...]:
        each = st.floats(least, most, allow_nan=False)
        return tuple(data.draw(st.lists(each, min_size=p, max_size=p)))

    activation = stages(0.5, 2)
    share = data.draw(st.floats(0, 3))
    times, comm = [stages(0, 3) for _ in 'FBW'], data.draw(st.floats(0, 2))
    retained = tuple(share * full for full in activation)
    costs = Costs.of(*times, comm, activation=activation, retained=retained)
    most = max(activation) * max(1, share)
    limit = data.draw(st.none() | st.floats(most, 2 * p * most))
    schedule = build(name, p, m, costs=costs, memory_limit=limit)
    check(schedule)
    laps = {'zb-1p': 1, 'zb-2p': 2}[name]
    for held, full in zip(peak(schedule, costs), activation, strict=True):
        rise = max(0.0, share - 1) * full
        assert held <= (laps * p * full + rise if limit is None else limit) * (1 + 1e-6)


def relabelled(schedule: Schedule, name: str) -> Schedule:
    return Schedule.of(name, schedule.placement, schedule.num_microbatches, schedule.passes)


@pytest.mark.parametrize(('p', 'm'), [(1, 3), (4, 3), (4, 8), (5, 13)])
def test_with_one_chunk_the_interleaved_ones_are_their_plain_selves(p, m):
    both = {'interleaved': '1f1b', 'zb-interleaved': 'zb-h1', 'breadth-first': 'gpipe'}
    for chunked, plain in both.items():
        assert relabelled(build(chunked, p, m, num_chunks=1), plain) == build(plain, p, m)


# ---- Families by themselves: STP, kFkB, and those of controlled memory.


# chunk activations on each rank; what waits for W counts whole
PEAKS = {2: (7, 7), 4: (13, 13, 14, 15), 8: (25, 25, 26, 27, 28, 29, 30, 31)}


@grid(p=tuple(PEAKS), more=(-1, 0, 5))
def test_numbers(p, more):
    """The makespan is that of ZB-V; peaks are 3p+1 chunks on rank 0 to 4p-1 on the last."""
    m = 3 * p + more
    for together in (False, True):
        schedule = build('stp', p, m, together=together)
        check(schedule)
        costs = Costs.uniform(schedule.placement)
        assert simulate(schedule, costs).makespan == 3 * m + (p - 1) / 2
        assert peak(schedule, costs) == tuple(count / 2 for count in PEAKS[p])
    assert len(PEAKS[p]) == p and PEAKS[p][0] == 3 * p + 1 and PEAKS[p][-1] == 4 * p - 1


@grid(p=(2, 3, 5, 8), m=(1, 2, 5, 7, 13))
def test_any_number_of_microbatches(p, m):
    """It is the order of 3p-1 without the missing ones, with and without cells."""
    schedule = build('stp', p, m)
    check(schedule)
    check(build('stp', p, m, together=True))
    if m < 3 * p - 1:
        whole = build('stp', p, 3 * p - 1).passes
        assert schedule.passes == tuple(
            tuple(p for p in order if p.microbatch < m) for order in whole
        )


def test_pairs():
    """Of each kind as many as the steps say."""
    p, m = 4, 14
    schedule = build('stp', p, m, together=True)
    for rank in range(p):
        cells = [entry for entry in schedule.order(rank) if isinstance(entry, Together)]
        kinds = [''.join(sorted(one.kind for one in cell.passes)) for cell in cells]
        below, steady = p - 1 - rank, 2 * (m - 3 * p + 1) + 1 + 2 * rank
        assert kinds.count('FF') == (rank + 1) // 2
        assert kinds.count('FW') == below
        assert kinds.count('BWF') == steady - rank
        assert kinds.count('BF') == below + rank + 2 * p - 2 - rank
        assert all(len(cell.passes) == 2 for cell in cells)
        assert all(len({one.microbatch for one in cell.passes}) == 2 for cell in cells)


@pytest.mark.parametrize(
    ('halved', 'given'),
    [
        ('FB', {'together': 0.5, 'pairs': {'FF': 1.0, 'FW': 1.0}}),
        ('FF', {'pairs': {'FF': 0.5}}),
        ('FW', {'pairs': {'FW': 0.5}}),
    ],
)
def test_each_kind_of_pair_takes_its_own_time(halved, given):
    """So that overlap of tensor-parallel communication is simulated, kind by kind."""
    schedule = build('stp', 4, 12, together=True)
    timeline = simulate(schedule, replace(Costs.uniform(schedule.placement), **given))
    seen = set()
    for rank, at in schedule.together:
        pair = schedule.passes[rank][at : at + 2]
        kind = 'F' + pair[1].kind[0]
        (start, _), (_, end) = timeline.spans[rank][at : at + 2]
        alone = sum(1.0 if one.kind == BW else 0.5 for one in pair)
        assert end - start == (0.5 if kind == halved else 1.0) * alone
        seen.add(kind)
    assert seen == {'FB', 'FF', 'FW'}


# ---- kFkB: k as messages and memory ask for it.


def costs_of(p: int, comm: float) -> Costs:
    return Costs.uniform(Placement.loop(p), comm=comm)


def size(schedule) -> int:
    """Return k: how many forwards the last rank runs before its first backward."""
    return next(at for at, p in enumerate(schedule.passes[-1]) if p.kind != F)


@pytest.mark.parametrize(('comm', 'k'), [(0, 1), (0.1, 2), (1.5, 2), (2, 4), (4.5, 4), (10, 8)])
def test_the_slower_the_messages_the_larger_the_groups(comm, k):
    """k is the least of 1, 2, 4, ... with 2c <= (k-1)(F+B+W): then messages count but once."""
    schedule = build('kfkb', 4, 24, costs=costs_of(4, comm))
    check(schedule)
    assert size(schedule) == k
    makespan = simulate(schedule, costs_of(4, comm)).makespan
    assert makespan == pytest.approx(3 * (24 + 3) + 2 * 3 * comm)


@pytest.mark.parametrize(('limit', 'k'), [(4, 1), (7.9, 1), (8, 2), (15, 2), (16, 4)])
def test_memory_limits_k(limit, k):
    slow = costs_of(4, 3)
    schedule = build('kfkb', 4, 24, costs=slow, memory_limit=limit)
    assert size(schedule) == k and max(peak(schedule, slow)) == 4 * k
    assert size(build('kfkb', 4, 24, memory_limit=limit)) == min(k, 2)


def test_less_memory_than_1f1b():
    """Ranks run fewer forwards ahead; one activation is the least."""
    for limit in (3, 1):
        schedule = build('kfkb', 4, 24, costs=costs_of(4, 3), memory_limit=limit)
        check(schedule)
        assert max(peak(schedule, costs_of(4, 3))) == limit


@grid(p=(4, 2), m=(8, 3, 1))
def test_its_ends_are_1f1b_and_gpipe(p, m):
    assert build('kfkb', p, m, costs=costs_of(p, 0)).passes == build('1f1b', p, m).passes
    assert build('kfkb', p, 2).passes == build('gpipe', p, 2).passes


def test_plans_start_from_it_with_the_measured_messages():
    """So `auto` weighs it, with k by what it has measured, within the memory that there is."""
    placement = Placement.loop(4)
    for comm, limit, wins in ((1.5, inf, True), (1.5, 4, False), (0, inf, False)):
        found = named(Problem(placement, 16, costs_of(4, comm), (limit,) * 4))
        values = {each.name: each.value for each in found}
        assert (values['kfkb'] < values['1f1b'] - 10) is wins


def test_the_shorter_of_both_tightenings():
    """With the steady state tightened, too, V-Min would take 61 passes' time here."""
    schedule = build('v-min', 6, 7)
    timeline = simulate(schedule, Costs.uniform(schedule.placement, 2, 2, 2))
    assert timeline.makespan == max(timeline.windows) == 59


# ---- Families of a user's own module: registered by a decorator, found by `package.module:name`.


OWN = '''
"""A schedule of one's own."""

from pathlib import Path

from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules import family
from megatron_zbpp.schedules.construct.phases import phases

with Path(__file__).with_name('imports').open('a') as log:
    log.write('x')


@family('Eager_Up', aliases=('up',))
def eager(num_ranks, num_microbatches, num_chunks=3):
    """All forwards, then all backwards."""
    placement = Placement.loop(num_ranks, num_chunks)
    every = num_chunks * num_microbatches
    table = [(every, 'F', 'up'), (every, 'BW', 'down')]
    return Schedule.of('eager', placement, num_microbatches, (
        phases(placement.stages(rank), num_microbatches, table) for rank in range(num_ranks)
    ))


@family('wrong-size')
def wrong(num_ranks, num_microbatches):
    """Makes a schedule of another size."""
    return eager(num_ranks, num_microbatches + 1)


@family('nothing')
def nothing(num_ranks, num_microbatches):
    """Forgets to return it."""


def plain(num_ranks, num_microbatches):
    return eager(num_ranks, num_microbatches)
'''


MODULES = {
    'orders': OWN,
    'broken': '1 / 0\n',
    'lacking': 'import no_such_module_at_all\n',
    'thief': 'from megatron_zbpp.schedules import family\n\n\n'
    "@family('a')\ndef b(num_ranks, num_microbatches):\n    pass\n\n\n"
    "@family('b')\ndef c(num_ranks, num_microbatches):\n    pass\n",
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """On sys.path, with modules of somebody's own."""
    folder = tmp_path_factory.mktemp('own')
    (folder / 'ownzb').mkdir()
    for name, text in MODULES.items():
        (folder / 'ownzb' / f'{name}.py').write_text(text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def own(folder):
    return find('ownzb.orders:eager-up')


def test_it_is_found_by_its_address(own, folder):
    """By the name that it registers, in any spelling, by an alias, and by that of the function."""
    assert own.name == 'ownzb.orders:Eager_Up'
    assert own.summary == 'All forwards, then all backwards.' and own.source == 'ownzb.orders'
    assert (own.default_chunks, own.chunks, own.options) == (3, ANY, ('num_chunks',))
    for name in ('ownzb.orders:EAGERUP', ' ownzb.orders:eager', 'ownzb.orders:Up'):
        assert find(name) is own
    assert find('ownzb.orders:nothing').chunks == ONE
    assert (folder / 'ownzb' / 'imports').read_text() == 'x', 'imported more than once'
    schedule = build('ownzb.orders:eager-up', 2, 3)
    assert schedule.placement.num_chunks == 3
    assert build(own.name, 2, 3, num_chunks=3) == schedule
    assert Settings('ownzb.orders:eager_up') == Settings('ownzb.orders:Eager-Up')
    assert Settings('ownzb.orders:eager').schedule == own.name
    assert own.name not in names() and own not in FAMILIES


@pytest.mark.parametrize(('name', 'says'), NAMED['refused'].items())
def test_refusals_name_the_module_and_the_cure(own, name, says):
    for ask in (find, Settings):
        with pytest.raises(ValueError) as refusal:
            ask(name)
        assert all(part in str(refusal.value) for part in says), refusal.value


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('wrong-size', 'a schedule of 2 ranks and 4 microbatches: return one of the 2 and 3'),
        ('nothing', 'made NoneType: return a Schedule'),
    ],
)
def test_what_it_makes_is_what_was_asked_for(own, name, says):
    with pytest.raises(ValueError, match=says):
        build(f'ownzb.orders:{name}', 2, 3)


def test_a_module_may_be_loaded_again(own, folder):
    """The family of the same address takes the place of the old one."""
    assert family('Eager_Up')(own.generate) is own.generate
    assert find('ownzb.orders:eager').name == own.name
    # in a process of its own, which imports the module where it is named
    command = [sys.executable, '-m', 'megatron_zbpp.cli', 'simulate', '--schedule']
    command += ['ownzb.orders:eager-up', '--pp', '2', '--microbatches', '4', '--json']
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        command, env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['peak_activations'] == [4.0, 4.0]
