"""The cure that a message of `zbpp` names, applied to what raised it, gets further."""

from __future__ import annotations

import pytest

from megatron_zbpp.cli import main
from megatron_zbpp.mcore.settings import Settings

SHAPE = ['--pp', '4', '--microbatches', '8']
SHOW = ['show', '--schedule', 'zb-v', *SHAPE]


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
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_of_a_command(tmp_path, monkeypatch, capsys, given, said, cured) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert main(given) == 2
    assert said in capsys.readouterr().err
    assert main(cured) == 0


@pytest.mark.parametrize(
    ('given', 'said', 'cured'),
    [
        ({'schedule': 'zb-v', 'num_chunks': 8}, '(num_chunks, --vpp', {'schedule': 'zb-v'}),
        ({'schedule': 'zb-v', 'memory_limit': 3}, 'or use one that does: ', {'schedule': 'zb-1p'}),
        ({'schedule': 'auto', 'offload': 'half'}, 'name a schedule', {'schedule': 'zb-v'}),
        ({'watchdog_timeout': -1}, 'give a number from 0 up', {'watchdog_timeout': 0}),
        ({'post_validation': 1.5}, 'give a whole number', {'post_validation': 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_of_a_program(given, said, cured) -> None:
    with pytest.raises(ValueError) as error:
        Settings(**given)
    assert said in str(error.value)
    kept = given if 'schedule' in cured and said.startswith(('or use', 'name a')) else {}
    Settings(**(kept | cured))
