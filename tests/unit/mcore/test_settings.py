"""What `enable` is asked for makes sense, or is refused by its name."""

from __future__ import annotations

import functools
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import pytest
from supported import refuses

import megatron_zbpp
from megatron_zbpp import bridge
from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.partitioning.freeze_plans import FreezePlan
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.slices.graph import sized
from megatron_zbpp.techniques.slices.place import in_slices
from megatron_zbpp.techniques.two_way.fold import folded

TWO_WAYS = 'two_ways:two-ways'


@pytest.mark.parametrize(
    ('asked', 'said'),
    [
        ({'schedule': None}, 'schedule None is neither the name of one'),
        ({'schedule': 5}, 'schedule 5 is neither'),
        ({'schedule': 'plan.json'}, "'plan.json' is a file: give megatron_zbpp.load of it"),
        ({'schedule': 'zb-v', 'num_chunks': 3}, 'zb-v cannot have 3 chunks per rank'),
        ({'num_chunks': 0}, 'num_chunks is 0: give a whole number from 1 up'),
        ({'schedule': 'interleaved', 'num_chunks': 2.5}, 'num_chunks is 2.5: give a whole number'),
        ({'schedule': 'interleaved', 'num_chunks': True}, 'num_chunks is True'),
        ({'schedule': 'auto', 'memory_limit': -1}, 'memory_limit is -1: give a number from 0 up'),
        ({'schedule': 'auto', 'memory_limit': nan}, 'memory_limit is nan'),
        ({'schedule': 'zb-v', 'memory_limit': 4}, 'zb-v has one peak memory'),
        ({'watchdog_timeout': 'abc'}, "watchdog_timeout is 'abc': give a number from 0 up"),
        ({'watchdog_timeout': inf}, 'watchdog_timeout is inf'),
        ({'watchdog_pause_timeout': -3}, 'watchdog_pause_timeout is -3'),
        (
            {'post_validation': 'yes'},
            "post_validation is 'yes': give a whole number",
        ),
        ({'post_validation': -3}, 'post_validation is -3'),
        ({'profile_iters': 0}, 'profile_iters is 0: give a whole number from 1 up'),
        ({'check_interval': -1}, 'check_interval is -1: give a whole number from 0 up'),
        ({'schedule': build('1f1b', 2, 2), 'num_chunks': 1}, 'num_chunks: the schedule that is'),
        ({'recompute': 'some'}, "recompute of 'some': give 'half', 'all' or a number"),
        ({'message_ctas': 0}, 'message_ctas is 0: give a whole number from 1 up'),
        ({'message_priority': 'low'}, "message_priority is 'low': give 'high' or 'group'"),
        (
            {'message_receives': 'soon'},
            "message_receives is 'soon': give 'early', 'late' or 'latest'",
        ),
        ({'dropout_seeds': 'yes'}, "dropout_seeds is 'yes': give True or False"),
        ({'schedule': 'paci', 'dropout_seeds': True}, 'paci is asynchronous: leave it out'),
        ({'same_start': 'tt|ttL'}, "same_start is 'tt|ttL': give True, False, or the stages"),
        ({'kept_gib': -1}, 'kept_gib is -1: give a number from 0 up'),
        ({'recompute': 'all', 'schedule': 'auto'}, 'recompute: auto plans orders only: name a'),
    ],
    ids=str,
)
def test_nonsense_is_named(asked, said):
    with pytest.raises(ValueError) as error:
        Settings(**asked)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ('asked', 'said'),
    [(5, 'trace_dir is 5: give the path'), ('', "trace_dir is ''"), (__file__, 'which is a file')],
    ids=['number', 'empty', 'file'],
)
def test_a_folder_that_is_none(asked, said):
    """Said before anything starts, by the flag and by `enable`, not in the fifth iteration."""
    with pytest.raises(ValueError) as error:
        megatron_zbpp.enable('zb-h1', trace_dir=asked)
    assert said in str(error.value)


FREEZING = FreezePlan(build('1f1b', 2, 2), (), 1.0, 1.0)


def test_freezing_that_cannot_be(tmp_path):
    """Said before anything starts."""
    with pytest.raises(ValueError, match='freeze: it is planned for one schedule'):
        Settings('auto', freeze=FREEZING)
    with pytest.raises(ValueError, match='freeze is 5: give the path'):
        megatron_zbpp.enable('zb-h1', freeze=5)
    file = tmp_path / 'other.json'
    file.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"other\.json: 'format': .* give what zbpp freeze -o"):
        megatron_zbpp.enable('zb-h1', freeze=file)
    with pytest.raises(OSError, match=r'No such file.* give what zbpp freeze -o'):
        megatron_zbpp.enable('zb-h1', freeze=tmp_path / 'no.json')
    for name, said in (('zb-h1', 'planned for 1f1b of 2 ranks and 2 microbatches, but zb-h1'),
                       ('1f1b', '1f1b has no W passes')):  # fmt: skip
        programs = Plugin(Settings(name, freeze=FREEZING)).session.programs
        with pytest.raises(ValueError, match=said):
            programs.lowered(2, 2, forward_only=False)
        assert programs.lowered(2, 2, forward_only=True)


def test_chunks_that_a_rank_builds():
    """What `plugin.num_chunks` says: of a family, its default, what is asked for, and a value."""
    for asked, chunks in (
        (Settings('zb-v'), 2),
        (Settings('zb-h1'), 1),
        (Settings('interleaved', 4), 4),
        (Settings('auto'), 2),
        (Settings(build('zb-interleaved', 2, 2, num_chunks=3)), 3),
    ):
        assert Plugin(asked).num_chunks == chunks


def test_flags_that_are_none():
    with pytest.raises(ValueError, match=r'flags is 5: give names with values, such as vars'):
        megatron_zbpp.enable('zb-h1', flags=5)


def test_sense():
    assert Settings(trace_dir='pictures').trace_dir == Path('pictures')
    assert Settings().trace_dir is None
    assert Settings('ZB_V', 2) == Settings('zb-v', 2)
    assert Settings(post_validation=True) == Settings(post_validation=10)
    assert Settings('auto', memory_limit=4).memory_limit == 4
    assert Settings(build('1f1b', 2, 2)).schedule.name == '1f1b'


@pytest.mark.parametrize(
    ('asked', 'found'), [(4, 4), ('4', 4), ('8,4,4', (8, 4, 4)), ([8, 4, 4], (8, 4, 4))]
)
def test_slices(asked, found):
    assert Settings('zb-v', slices=asked).slices == found


@pytest.mark.parametrize('asked', [0, -1, True, 2.5, '', '4,', '4,x', '4,0', []])
def test_what_slices_are_not(asked):
    with pytest.raises(ValueError, match=r'slices is .*: give how many, such as 4, or the tokens'):
        Settings('zb-v', slices=asked)


def test_a_plan_says_where_sequences_are_cut():
    """Unless sizes of one's own are given, and only if they are of such a sequence."""
    made = in_slices('1f1b', 2, 2, 3)
    own, config = replace(made, graph=sized(made.graph, (5, 2, 3))), SimpleNamespace()
    assert Programs(Settings(own)).cuts(config, 10) == (0, 5, 7, 10)
    assert Programs(Settings(own, slices=(2, 4, 4))).cuts(config, 10) == (0, 2, 6, 10)
    assert Programs(Settings(made)).cuts(config, 9) == (0, 3, 6, 9)
    with pytest.raises(ValueError, match='slices: 5,2,3 are 10 tokens, but sequences have 12'):
        Programs(Settings(own)).cuts(config, 12)


@refuses('a family of two routes that does not say so', 'replicas run it in pairs')
def test_two_routes_are_said():
    """Each chunk would have got the microbatches of one route only."""
    programs = Plugin(Settings(TWO_WAYS)).session.programs  # is made when sizes are known
    for ask in (
        lambda: programs.placement(2),
        lambda: programs.splits(2),
        lambda: programs.lowered(2, 4, forward_only=False),
    ):
        with pytest.raises(ValueError, match='two-ways makes 2 ways through the ranks, not 1: say'):
            ask()


def test_a_two_way_pipeline_is_two_replicas():
    """Of half the ranks and microbatches; a schedule that is given has both."""
    for asked in ('chimera', build('chimera', 4, 6)):
        programs = Plugin(Settings(asked)).session.programs
        assert programs.num_replicas == programs.num_chunks == 2
        assert programs.placement(2) == Placement.v(2).reversed()
        lowered = programs.lowered(2, 3, forward_only=False)
        assert lowered.placement.routes == ((2, 0, 1, 3), (3, 1, 0, 2))
        assert lowered.schedule.num_microbatches == 6
    with pytest.raises(ValueError, match='for 2 pipeline ranks, not 4: change the parallel'):
        programs.schedule(4, 3)
    with pytest.raises(ValueError, match='for 3 microbatches, not 6: change the parallel'):
        programs.schedule(2, 6)


def test_routes_that_are_no_replicas():
    placement = Placement((0, 1, 2, 2), opposite=(1, 0, 2, 2), route=(0, 1))
    with pytest.raises(ValueError, match=r'cannot be two replicas because .*: give both routes'):
        folded(placement)


@pytest.mark.parametrize(
    ('given', 'told'),
    [
        (
            {'nonsense': 1},
            "got an unexpected keyword argument 'nonsense': there are schedule, num_",
        ),
        ({'ofload': 'all'}, "got an unexpected keyword argument 'ofload': did you mean offload?"),
    ],
)
def test_an_argument_that_enable_does_not_have(given, told):
    """It names the function that was called, of the package or for Megatron-Bridge."""
    for name, call in (
        ('enable', megatron_zbpp.enable),
        ('bridge.enable', functools.partial(bridge.enable, None)),
    ):
        with pytest.raises(TypeError) as error:
            call(**given)
        assert str(error.value).startswith(f'{name}() {told}')
    with pytest.raises(
        TypeError, match=r'^enable\(\) too many positional arguments: there are sch'
    ):
        megatron_zbpp.enable('zb-v', 2, 3)
    with pytest.raises(TypeError, match=r'^enable\(\) multiple values for argument .schedule.: '):
        megatron_zbpp.enable('zb-v', schedule='zb-v')
