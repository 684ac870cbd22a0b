"""Options are written once: `enable`, its help, flags and `zbpp` are made from the same fields."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass, fields

import pytest

import megatron_zbpp
from megatron_zbpp.cli import main
from megatron_zbpp.mcore.command_line import flags
from megatron_zbpp.mcore.options import Option, option, options_of, with_options_of
from megatron_zbpp.mcore.settings import OPTIONS, Settings

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
    given = flags.read(parser.parse_args(['--pipeline-schedule', 'zb-v', *words]))
    return flags.settings_of(given, given['pipeline_schedule'], None)


def test_flags_ask_for_what_enable_asks_for():
    """Without one for the defaults, but for the watchdog, which a launched job has."""
    assert parsed() == Settings('zb-v', watchdog_timeout=300)
    words = {
        'memory_limit': ('auto', '4.5', 4.5),
        'profile_iters': ('auto', '3', 3),
        'offload': ('zb-v', '1', '1'),
        'recompute': ('zb-v', 'half', 'half'),
        'slices': ('zb-v', '8,4', (8, 4)),
        'vocab_parallel': ('1f1b', 'input+output', 'input+output'),
        'anneal_steps': ('pipemare', '9', 9),
        'correction_decay': ('pipemare', '0.5', 0.5),
        'async_warmup_steps': ('paci', '2', 2),
        'clip': ('paci', 'global', 'global'),
        'message_ctas': ('zb-v', '4', 4),
        'message_priority': ('zb-v', 'group', 'group'),
        'message_receives': ('zb-v', 'early', 'early'),
        'trace_dir': ('zb-v', 'pictures', 'pictures'),
        'watchdog_timeout': ('zb-v', '0', None),
        'watchdog_pause_timeout': ('zb-v', '7', 7),
        'kept_gib': ('zb-v', '0.5', 0.5),
        'check_interval': ('zb-v', '0', 0),
    }
    alone = {name for name, each in OPTIONS.items() if each.flag}
    assert alone - words.keys() == {'freeze', 'dropout_seeds'}  # needs a file; a switch
    for name, (schedule, text, value) in words.items():
        made = parsed('--pipeline-schedule', schedule, OPTIONS[name].name, text)
        assert made == Settings(schedule, **{'watchdog_timeout': 300, name: value}), name


def test_a_switch_that_takes_something_out():
    assert parsed().same_start is True
    assert parsed('--no-pipeline-same-start').same_start is False
    assert parsed().dropout_seeds is False
    assert parsed('--pipeline-dropout-seeds').dropout_seeds is True
    assert parsed().prewarm is None
    assert parsed('--no-pipeline-prewarm').prewarm is False
    assert parsed('--pipeline-prewarm').prewarm is True


def test_flags_that_together_are_an_option():
    early, steps = (each.name for each in OPTIONS['post_validation'].parts)
    assert parsed(early).post_validation == Settings(post_validation=True).post_validation == 10
    assert parsed(early, steps, '0').post_validation == 0
    assert parsed(steps, '3').post_validation is None
    with pytest.raises(ValueError, match=f'{steps} is -1: give a whole number from 0 up'):
        parsed(steps, '-1')
    with pytest.raises(ValueError, match=r'-schedule-memory-limit is -1\.0: give a number'):
        parsed(OPTIONS['memory_limit'].name, '-1')


def test_flags_of_the_program_make_no_other_settings():
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
