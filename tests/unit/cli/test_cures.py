"""The cure that a message of `zbpp` names, applied to what raised it, gets further."""

from __future__ import annotations

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.mcore.settings import Settings

SHAPE = ['--pp', '4', '--microbatches', '8']
SHOW = ['show', '--schedule', 'zb-v', *SHAPE]
SIMULATE = ['simulate', '--schedule', 'zb-v', *SHAPE]


def code(words: list[str]) -> int:
    """What the command ends with: argparse raises it."""
    try:
        return main(words)
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize(
    ('given', 'said', 'cured'),
    [
        ([*SHOW, '--vpp', '8'], '--vpp, or --num-virtual-stages-per-pipeline-rank) out', SHOW),
        (
            ['show', '--schedule', 'zb-w', *SHAPE],
            "unknown schedule 'zb-w'",
            ['show', '--schedule', 'zb-v', *SHAPE],
        ),
        (
            ['show', '--schedule', 'zb-v', '--pp', '1', '--microbatches', '8'],
            'use more pipeline ranks or another schedule, such as 1f1b',
            ['show', '--schedule', '1f1b', '--pp', '1', '--microbatches', '8'],
        ),
        (
            ['show', '--schedule', 'zb-v', '--pp', '4'],
            'needs --microbatches: give a number from 1 up',
            SHOW,
        ),
        (
            ['simulate', '--schedule', 'zb-h1', *SHAPE, '--memory-limit', '0.5'],
            '4 at its peak, above the limit of 0.5: raise the limit',
            ['simulate', '--schedule', 'zb-h1', *SHAPE, '--memory-limit', '4'],
        ),
        ([*SHOW, '--together', '0.8'], 'take dualpipe-v, or leave it out', SHOW),
        (
            ['simulate', '--schedule', '1f1b', *SHAPE, '--copy-ratio', '1'],
            'give --offload, or a schedule that moves activations, such as po-f or bpipe',
            ['simulate', '--schedule', '1f1b', *SHAPE, '--copy-ratio', '1', '--offload', 'half'],
        ),
        (
            ['compare', *SHAPE, '--csv', 'rows.csv'],
            "--csv goes with --layers-file: name the file of a model's layers",
            ['compare', *SHAPE],
        ),
        (
            ['plan', *SHAPE, '--actions', 'offload', '--seconds', '1'],
            '--actions are for a memory limit: give --memory-limit or --frontier',
            ['plan', *SHAPE, '--actions', 'offload', '--seconds', '1', '--memory-limit', '3'],
        ),
        ([*SIMULATE, '--times', '1,1'], 'give three times, F,B,W', [*SIMULATE, '--times', '1,1,1']),
        (
            [*SIMULATE, '--offload=-1'],
            "give 'half', 'all', 'auto' or a number of chunks",
            [*SIMULATE, '--offload', '1'],
        ),
        (
            [*SIMULATE, '--recompute', '9'],
            'recompute of 9 chunks: a rank has 2: give a number up to 2',
            [*SIMULATE, '--recompute', '2'],
        ),
        (
            ['simulate', '--schedule', 'po-h', *SHAPE, '--offload', 'half'],
            'offload: po-h has offload already, and it is placed once: leave it out',
            ['simulate', '--schedule', 'po-h', *SHAPE],
        ),
        (
            ['compare', *SHAPE, '--schedules', 'zb-q'],
            "did you mean 'zb-v' or ",
            ['compare', *SHAPE, '--schedules', 'zb-v'],
        ),
        (['show', *SHAPE], 'one of the arguments --schedule --file is required', SHOW),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_of_a_command(tmp_path, monkeypatch, capsys, given, said, cured) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert code(given) == 2
    assert said in capsys.readouterr().err
    assert code(cured) == 0


@pytest.mark.parametrize(
    ('given', 'said', 'cured'),
    [
        ({'schedule': 'zb-v', 'num_chunks': 8}, '(num_chunks, --vpp', {'schedule': 'zb-v'}),
        ({'schedule': 'zb-v', 'memory_limit': 3}, 'or use one that does: ', {'schedule': 'zb-1p'}),
        ({'schedule': 'auto', 'offload': 'half'}, 'name a schedule', {'schedule': 'zb-v'}),
        ({'watchdog_timeout': -1}, 'give a number from 0 up', {'watchdog_timeout': 0}),
        ({'post_validation': 1.5}, 'give a whole number', {'post_validation': 1}),
        ({'check_interval': -1}, 'give a whole number from 0 up', {'check_interval': 0}),
        ({'num_chunks': 0}, 'give a whole number from 1 up', {'num_chunks': 1}),
        ({'message_ctas': 0}, 'give a whole number from 1 up', {'message_ctas': 1}),
        ({'profile_iters': 0.5}, 'give a whole number from 1 up', {'profile_iters': 1}),
        ({'recompute': 'most'}, "give 'half', 'all'", {'recompute': 'half'}),
        ({'offload': 'some'}, "give 'half', 'all', 'auto' or a number", {'offload': 'all'}),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_of_a_program(given, said, cured) -> None:
    with pytest.raises(ValueError) as error:
        Settings(**given)
    assert said in str(error.value)
    kept = given if 'schedule' in cured and said.startswith(('or use', 'name a')) else {}
    Settings(**(kept | cured))
