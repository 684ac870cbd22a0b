"""The registry: names, options, and what every schedule of the library must be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import BW, B, F, Schedule, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.schedules import FAMILIES, Family, build, find, names, registry

LIBRARY = {
    'gpipe',
    '1f1b',
    '1f1b-pb',
    'kfkb',
    '2bp',
    '2bp-1f1b',
    'merak',
    'varuna',
    'interleaved',
    'breadth-first',
    'zb-h1',
    'zb-h2',
    'zb-1p',
    'zb-2p',
    'zb-v',
    'v-half',
    'v-min',
    '1f1b-v',
    'zb-interleaved',
    'gis',
    'gis-h',
    'po',
    'po-h',
    'po-f',
    'bpipe',
    'hanayo',
    'dualpipe-v',
    'stp',
    'zeropp',
}


@st.composite
def requests(draw: st.DrawFn, most_ranks: int = 6, most_microbatches: int = 15) -> dict:
    """Arguments of `build` that each family must take."""
    family = draw(st.sampled_from(FAMILIES))
    chunks = st.sampled_from(family.chunks[:3]) if len(family.chunks) > 1 else st.none()
    return {
        'name': family.name,
        'num_ranks': draw(st.integers(family.min_ranks, most_ranks)),
        'num_microbatches': draw(st.integers(1, most_microbatches)),
        'num_chunks': draw(st.none() | chunks),
    }


@settings(max_examples=200)
@given(requests())
def test_every_schedule_may_run(request):
    schedule = build(**request)
    check(schedule)
    assert schedule.name == request['name']
    assert schedule.num_ranks == request['num_ranks']
    assert schedule.num_microbatches == request['num_microbatches']
    v = request['num_chunks'] or find(request['name']).default_chunks
    assert all(len(schedule.placement.stages(rank)) == v for rank in range(schedule.num_ranks))


@settings(max_examples=200)
@given(requests())
def test_gradients_come_in_microbatch_order(request):
    schedule = build(**request)
    for stage, rank in enumerate(schedule.placement.only_route):
        for kinds in ((F,), (B, BW), (W, BW)):
            order = [
                p.microbatch for p in schedule.passes[rank] if p.stage == stage and p.kind in kinds
            ]
            assert order == list(range(schedule.num_microbatches)), (stage, kinds)


@settings(max_examples=100)
@given(requests())
def test_never_more_activations_than_microbatches(request):
    schedule = build(**request)
    assert max(peak(schedule, Costs.uniform(schedule.placement))) <= schedule.num_microbatches


@settings(max_examples=100)
@given(requests(), st.data())
def test_pure(request, data):
    again = data.draw(st.sampled_from(['lower', 'upper', 'title']))
    name = getattr(request['name'], again)().replace('-', data.draw(st.sampled_from('-_')))
    assert build(**request) == build(**{**request, 'name': name})


def test_the_library_is_whole():
    assert sorted(names()) == sorted(LIBRARY)


@pytest.mark.parametrize(
    ('alias', 'name'),
    {
        'GPipe': 'gpipe',
        '1F1B': '1f1b',
        'Interleaved1F1B': 'interleaved',
        'LoopedBFS': 'breadth-first',
        'InterleavedZeroBubble': 'zb-interleaved',
        'ZBVZeroBubble': 'zb-v',
        'DualPipeV': 'dualpipe-v',
        'ScheduleDualPipeV': 'dualpipe-v',
        'zbh1': 'zb-h1',
        'ZB1P': 'zb-1p',
        'zb2p': 'zb-2p',
        'zbv': 'zb-v',
        'zb': 'zb-v',
        'half': 'v-half',
        'min': 'v-min',
        'v1f1b': '1f1b-v',
        'group_interleaved_1f1b': 'gis',
        'vpp': 'interleaved',
        '1f1b-interleaved': 'interleaved',
        'pipedream_flush': '1f1b',
        ' DAPPLE ': '1f1b',
    }.items(),
)
def test_names_of_others(alias, name):
    assert find(alias).name == name


def test_no_name_means_two_families():
    keys = [registry._key(name) for f in FAMILIES for name in (f.name, *f.aliases)]
    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize('family', FAMILIES, ids=lambda family: family.name)
def test_each_family_says_what_it_is(family: Family):
    text = family.generate.__doc__
    assert 'arXiv' in text and family.tier in registry.TIERS
    assert family.default_chunks in family.chunks
    assert f'>>> print(grid({family.generate.__name__}(' in text
    assert all((family.summary, family.bubble, family.memory, family.source, family.when))
    assert ('num_chunks' in family.options) == (len(family.chunks) > 1)


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [
        ({'name': 'zb-w'}, ["'zb-w'", "did you mean 'zb-v' or", 'zbpp list']),
        ({'name': 'nothing'}, ["'nothing'", 'known are', 'gpipe', 'zeropp']),
        ({'name': ''}, ["unknown schedule ''", 'known are']),
        ({'name': 'zb-v', 'num_ranks': 1}, ['zb-v', 'at least 2 ranks', 'not 1', '1f1b']),
        ({'name': '1f1b', 'num_ranks': 0}, ['1f1b', 'at least 1 ranks', 'not 0']),
        ({'name': '1f1b', 'num_microbatches': 0}, ['num_microbatches is 0', 'at least 1']),
        ({'name': '1f1b', 'num_microbatches': -3}, ['num_microbatches is -3']),
        ({'name': '1f1b', 'num_chunks': 2}, ['1f1b', '2 chunks', 'exactly 1']),
        ({'name': 'zb-v', 'num_chunks': 3}, ['zb-v', '3 chunks', 'exactly 2']),
        ({'name': 'hanayo', 'num_chunks': 3}, ['hanayo', '3 chunks', '2, 4, ...']),
        ({'name': 'interleaved', 'num_chunks': 0}, ['interleaved', '0 chunks', '1, 2, ...']),
        ({'name': 'zb-v', 'memory_limit': 3}, ['zb-v', 'given 3', 'zb-1p, zb-2p']),
        ({'name': 'zb-1p', 'memory_limit': 0.5}, ['0.5', 'too small', 'at least the 1.0']),
        ({'name': 'zb-1p', 'memory_limit': float('nan')}, ['nan', 'too small']),
        ({'name': '1f1b', 'costs': Costs.of((1,), (1,), (1,))}, ['of 1 stages', '1f1b has 4']),
    ],
    ids=str,
)
def test_refusals_name_value_and_cure(arguments, says):
    with pytest.raises(ValueError) as refusal:
        build(**{'num_ranks': 4, 'num_microbatches': 8, **arguments})
    assert all(part in str(refusal.value) for part in says), refusal.value


def test_a_fixed_number_of_chunks_may_be_named():
    assert build('zb-v', 4, 8, num_chunks=2) == build('zb-v', 4, 8)
    assert build('1f1b', 4, 8, num_chunks=1) == build('1f1b', 4, 8)


@pytest.mark.parametrize('name', names())
def test_costs_are_welcome_everywhere(name):
    """Who has one order whatever the times returns it; who adapts still returns one that runs."""
    plain = build(name, 4, 6)
    adapted = build(name, 4, 6, costs=Costs.uniform(plain.placement, 1, 1.4, 0.5, comm=0.1))
    check(adapted)
    if 'costs' not in find(name).options:
        assert adapted == plain


@settings(max_examples=150)
@given(
    name=st.sampled_from(['zb-1p', 'zb-2p']),
    p=st.integers(1, 6),
    m=st.integers(1, 14),
    data=st.data(),
)
def test_the_automatic_scheduler_keeps_its_limit(name, p, m, data):
    def stages(least: float, most: float) -> tuple[float, ...]:
        each = st.floats(least, most, allow_nan=False)
        return tuple(data.draw(st.lists(each, min_size=p, max_size=p)))

    activation = stages(0.5, 2)
    share = data.draw(st.floats(0, 3))
    costs = Costs.of(
        stages(0, 3),
        stages(0, 3),
        stages(0, 3),
        comm=data.draw(st.floats(0, 2)),
        activation=activation,
        retained=tuple(share * full for full in activation),
    )
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
    for chunked, plain in [
        ('interleaved', '1f1b'),
        ('zb-interleaved', 'zb-h1'),
        ('breadth-first', 'gpipe'),
    ]:
        assert relabelled(build(chunked, p, m, num_chunks=1), plain) == build(plain, p, m)
