"""Flags of other forks: each names ours instead, or says that it has no effect."""

from __future__ import annotations

import argparse

import pytest
from parsed_flags import parsed, refused


def test_megatrons_list_of_arguments_has_no_flags_of_other_forks():
    """Which would look switched off while a schedule of ours runs."""
    from megatron_zbpp.mcore.command_line import aliases

    parser = argparse.ArgumentParser()
    aliases.add_aliases(parser)
    assert vars(parser.parse_args([])) == {}
    assert vars(parser.parse_args(['--enable-zero-bubble'])) == {'enable_zero_bubble': True}


@pytest.mark.parametrize(
    ('flags', 'source', 'instead'),
    [
        (['--enable-zero-bubble'], ('zb-1p', None, None), '--pipeline-schedule zb-1p'),
        (
            ['--enable-zero-bubble', '--zero-bubble-max-pending-backward', 4],
            ('zb-1p', None, 4),
            '--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 4.0',
        ),
        (
            ['--enable-zero-bubble', '--zero-bubble-max-pending-backward', 'auto'],
            ('zb-1p', None, None),
            '--pipeline-schedule zb-1p',
        ),
        (['--zero-bubble-v-schedule'], ('zb-v', None, None), '--pipeline-schedule zb-v'),
        (
            ['--enable-zero-bubble', '--zero-bubble-v-schedule'],
            ('zb-v', None, None),
            '--pipeline-schedule zb-v',
        ),
        *(
            (
                ['--zero-bubble-v-schedule', '--zero-bubble-v-schedule-mem-setup', setup],
                (name, None, None),
                f'--pipeline-schedule {name}',
            )
            for setup, name in (('zb', 'zb-v'), ('half', 'v-half'), ('min', 'v-min'))
        ),
        (['--enable-1f1b-v'], ('1f1b-v', None, None), '--pipeline-schedule 1f1b-v'),
        (['--enable-zbh1-pipeline'], ('zb-h1', None, None), '--pipeline-schedule zb-h1'),
        (
            ['--enable-zbh1-pipeline', '--pipeline-schedule', 'zb-h1'],
            ('zb-h1', None, None),
            '--pipeline-schedule zb-h1',
        ),
    ],
    ids=lambda value: ' '.join(map(str, value)) if isinstance(value, list) else '',
)
def test_aliases(ranks, flags, source, instead):
    found = parsed(ranks, *flags)
    assert found.result.source == source
    assert found.said == f'megatron_zbpp: deprecated flags: use {instead}\n'
    again = parsed(ranks, *instead.split())
    assert again.result == found.result and not again.said


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--enable-zb-runtime'], 'every --pipeline-schedule has its runtime'),
        (['--offload-time', 4], '--pipeline-offload auto measures how long copies take'),
        (['--auto-offload-time'], '--pipeline-offload auto measures how long copies take'),
        (['--interleave-group-size', 4], 'a schedule has its own order of microbatches'),
        (['--allow-padding-num-layers'], 'layers need not divide among the stages'),
        (['--enable-exactly-numeric-match'], 'all numbers match exactly, always'),
        (['--zero-bubble-pipeline-timers-end-iter', 9], '--pipeline-schedule-profile-iters'),
        (['--zero-bubble-max-pending-backward', 4], 'a limit for --enable-zero-bubble alone'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else '',
)
def test_needless_aliases(ranks, flags, said):
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', *flags)
    assert found.result.source == ('zb-v', None, None)
    assert found.said.count('\n') == 1
    assert found.said.startswith(f'megatron_zbpp: {flags[0]} ')
    assert 'has no effect' in found.said and said in found.said


def test_chunks_to_offload(ranks):
    """`--offload-chunk-num` of the research fork is our --pipeline-offload."""
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', '--offload-chunk-num', 1)
    assert found.code is None, found.said
    assert found.said == 'megatron_zbpp: deprecated flags: use --pipeline-offload 1\n'


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (
            ['--pipeline-schedule', 'zb-h1', '--zero-bubble-v-schedule'],
            '--pipeline-schedule zb-h1 and a flag that means zb-v: give one of them',
        ),
        (
            ['--enable-1f1b-v', '--enable-zbh1-pipeline'],
            'flags that mean 1f1b-v and zb-h1: give --pipeline-schedule instead',
        ),
        (
            '--pipeline-schedule-memory-limit 3 --enable-zero-bubble '
            '--zero-bubble-max-pending-backward 4'.split(),
            '--pipeline-schedule-memory-limit 3.0 and a flag that means 4.0',
        ),
        (
            ['--enable-zero-bubble', '--zero-bubble-max-pending-backward', 'most'],
            '--zero-bubble-max-pending-backward most: give a number, or auto',
        ),
    ],
    ids=['schedules', 'forks', 'limits', 'no-number'],
)
def test_conflicting_aliases(ranks, flags, said):
    assert said in refused(ranks, *flags)
