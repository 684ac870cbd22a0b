"""What `enable` is asked for makes sense, or is refused by its name."""

from __future__ import annotations

import argparse
import inspect
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from supported import refuses

import megatron_zbpp
from megatron_zbpp import Placement, bridge, build
from megatron_zbpp.cli import main
from megatron_zbpp.launch import flags
from megatron_zbpp.mcore.options import Checks, Option, option, options_of, with_options_of
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import OPTIONS, Settings
from megatron_zbpp.techniques.slices.graph import sized
from megatron_zbpp.techniques.slices.place import in_slices

TWO_WAYS = 'two_ways:two-ways'


def test_what_settings_come_to():
    """What `plugin.num_chunks` says: of a family, its default, what is asked for, and a value."""
    for asked, chunks in (
        (Settings('zb-v'), 2),
        (Settings('zb-h1'), 1),
        (Settings('interleaved', 4), 4),
        (Settings('auto'), 2),
        (Settings(build('zb-interleaved', 2, 2, num_chunks=3)), 3),
    ):
        assert Plugin(asked).num_chunks == chunks
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
        lambda: programs.traits(2).splits,
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


def test_an_argument_that_enable_does_not_have():
    """It names the function that was called, of the package (see its golden file) or Bridge's."""
    with pytest.raises(TypeError, match=r'^bridge.enable\(\) got an .* did you mean offload\?'):
        bridge.enable(None, ofload='all')


# ---- Options are written once: `enable`, its help, flags and `zbpp` are made from the same fields.


NAMES = [field.name for field in fields(Settings)]


@dataclass(frozen=True)
class Two:
    size: int = option(3, '--our-size N', least=1)
    """Size of it. More."""
    share: float | None = option(None, '--share S', least=0.0, or_else=' or so')
    """Share
    of it."""


TWO = options_of(Two)


@with_options_of(Two, TWO)
def described(two: Two) -> str:
    """Describe both.

    Returns:
        Them.
    """
    return f'{two.size} {two.share}'


def test_a_function_takes_the_options():
    assert described() == '3 None' and described(4, share=0.5) == '4 0.5'
    assert str(inspect.signature(described)) == (
        "(size: 'int' = 3, share: 'float | None' = None) -> 'str'"
    )
    assert inspect.getdoc(described) == (
        'Describe both.\n\nArgs:\n    size: Size of it. More.\n    share: Share of it.\n\n'
        'Returns:\n    Them.'
    )
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        described(length=3)


@pytest.mark.parametrize(
    ('name', 'value', 'said'),
    [
        ('size', 0, 'x is 0: give a whole number from 1 up'),
        ('size', 1.0, 'x is 1.0: give a whole number from 1 up'),
        ('size', True, 'x is True: give a whole number from 1 up'),
        ('share', -0.5, 'x is -0.5: give a number from 0 up or so'),
        ('share', float('inf'), 'x is inf: give a number from 0 up or so'),
        ('share', '1', "x is '1': give a number from 0 up or so"),
    ],
)
def test_a_number_that_is_none(name, value, said):
    with pytest.raises(ValueError) as error:
        TWO[name].require(value, 'x')
    assert str(error.value) == said


def test_numbers():
    size, share = TWO.values()
    for each, value in ((size, 1), (size, None), (share, 0), (share, 0.5), (Option(), 'a')):
        each.require(value, 'x')
    assert (size.name, size.unit, size.dest, size.shown_default) == (
        ('--our-size', 'N', 'our_size', '3')
    )
    assert share.shown_default == ''


def test_enable_has_every_option():
    """In its signature with its default, in its docstring with its text."""
    parameters = inspect.signature(megatron_zbpp.enable).parameters
    assert [*parameters] == NAMES
    assert [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY] == NAMES[:2]
    assert {name: p.default for name, p in parameters.items()} == {
        field.name: field.default for field in fields(Settings)
    }
    said = ' '.join(inspect.getdoc(megatron_zbpp.enable).split())
    for name, each in OPTIONS.items():
        assert f' {name}: {each.text} ' in said
        assert each.text.endswith('.') and each.text[0].isupper()


def parsed(*words):
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    args = parser.parse_args(['--pipeline-schedule', 'zb-v', *words])
    request, checks = flags.read(vars(args)), Checks()
    made = request.settings(checks)
    checks.problems += request.problems
    checks.require_all(request.names)
    return made


def test_flags_ask_for_what_enable_asks_for():
    """Without one for the defaults, but for the watchdog, which a launched job has."""
    assert parsed() == Settings('zb-v', watchdog_timeout=300)
    # by option: a schedule, the text of the flag, and the value that it asks for
    words = json.loads(Path(__file__).with_name('flags.json').read_text())
    alone = {name for name, each in OPTIONS.items() if each.flag}
    assert alone - words.keys() == {'freeze', 'dropout_seeds'}  # needs a file; a switch
    for name, (schedule, text, value) in words.items():
        made = parsed('--pipeline-schedule', schedule, OPTIONS[name].name, text)
        value = tuple(value) if isinstance(value, list) else value
        assert made == Settings(schedule, **{'watchdog_timeout': 300, name: value}), name


def test_switches_and_flags_that_belong_together():
    assert parsed().same_start is True
    assert parsed('--no-pipeline-same-start').same_start is False
    assert parsed().dropout_seeds is False
    assert parsed('--pipeline-dropout-seeds').dropout_seeds is True
    assert parsed().prewarm is None
    assert parsed('--no-pipeline-prewarm').prewarm is False
    assert parsed('--pipeline-prewarm').prewarm is True
    early, steps = (each.name for each in OPTIONS['post_validation'].parts)
    assert parsed(early).post_validation == Settings(post_validation=True).post_validation == 10
    assert parsed(early, steps, '0').post_validation == 0
    assert parsed(steps, '3').post_validation is None
    with pytest.raises(ValueError, match=f'{steps} is -1: give a whole number from 0 up'):
        parsed(steps, '-1')
    with pytest.raises(ValueError, match=r'-schedule-memory-limit is -1\.0: give a number'):
        parsed(OPTIONS['memory_limit'].name, '-1')
    assert Settings(flags={'seed': 1}) == Settings(flags={'seed': 2}) == Settings()
    assert hash(Settings(flags={'seed': 1})) == hash(Settings())


@pytest.mark.parametrize(
    ('command', 'names'),
    [
        ('simulate', ('num_chunks', 'memory_limit', 'offload', 'recompute')),
        ('plan', ('num_chunks', 'memory_limit')),
        ('check', ('memory_limit',)),
    ],
)
def test_zbpp_says_what_the_options_say(command, names, monkeypatch, capsys):
    """Of what means the same there, the first sentence of their text."""
    monkeypatch.setenv('COLUMNS', '1000')
    with pytest.raises(SystemExit):
        main([command, '--help'])
    said = capsys.readouterr().out
    for name in names:
        assert OPTIONS[name].text.partition('. ')[0][1:] in said
