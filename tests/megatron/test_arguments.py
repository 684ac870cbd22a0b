"""Our flags: what they ask for is done, and what cannot work ends in one line."""

from __future__ import annotations

import argparse
from unittest import mock

import pytest
from parsed_flags import MEGATRONS, PLACED, parsed, refused

from megatron_zbpp.mcore.command_line.flags import FLAGS


def test_nothing_asked_nothing_done(ranks):
    found = parsed(ranks)
    assert found.result.source is None and not found.said
    assert found.result.placed == {name: MEGATRONS[name] for name in PLACED}


def test_what_is_about_a_schedule_wants_one(ranks):
    """Not ignored where Megatron's own runs: each flag but those that name a schedule."""
    names = []
    for each in FLAGS:
        if each.name in ('--pipeline-schedule', '--pipeline-schedule-file'):
            continue
        number = each.least is not None and (each.flag_default or 0) + max(1, each.least)
        value = [] if not each.unit else [number or 'all']
        said = f'{each.name} is about a --pipeline-schedule: give that, too'
        assert said in refused(ranks, each.name, *value)
        names.append(each.name)
    assert len(names) > 20
    both = ['--pipeline-freeze', 'all', '--enable-optimizer-post-validation']
    assert ' are about a --pipeline-schedule: give that, too' in refused(ranks, *both)


@pytest.mark.parametrize('name', ['clean-steps', 'check-interval'])
def test_post_validation_after_no_steps(ranks, name):
    flags = ['--pipeline-schedule', 'zb-v', '--enable-optimizer-post-validation']
    flags += [f'--optimizer-post-validation-{name}']
    said = refused(ranks, *flags, -1)
    assert f'{flags[-1]} is -1: give a whole number from 0 up' in said
    assert parsed(ranks, *flags, 0).code is None


def rerun_mode(words):
    from megatron_zbpp.mcore.command_line import sizes

    args = argparse.Namespace(rerun_mode='validate_results')
    return sizes.disable_rerun_checks(args, words), args.rerun_mode


def test_reruns_are_left_out_unless_asked_for(ranks):
    asked = ['--rerun-mode=validate_results']
    assert ranks(2).run(rerun_mode, []) == [(True, 'disabled')] * 2
    assert ranks(2).run(rerun_mode, asked) == [(False, 'validate_results')] * 2


def test_that_reruns_are_left_out_is_said_once(ranks):
    """On one rank of all: `of_all` holds that the others say nothing."""
    early = ['--pipeline-schedule', 'zb-v', '--enable-optimizer-post-validation']
    found = parsed(ranks, *early, rerun_mode='validate_results')
    assert found.code is None and found.said.count('--rerun-mode disabled, or all ranks would') == 1


@pytest.mark.parametrize(
    ('flags', 'changes', 'said'),
    [
        ('--pipeline-schedule zb-w', {}, ("unknown schedule 'zb-w'", "mean 'zb-v'")),
        (
            '--pipeline-schedule zb-h1 --pipeline-schedule-memory-limit 2',
            {},
            ('zb-h1', 'no --pipeline-schedule-memory-limit (given 2.0)', 'zb-1p'),
        ),
        (
            '--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 0.5',
            {},
            ('0.5 is too small', 'at least'),
        ),
        (
            '--pipeline-schedule zb-v --pipeline-watchdog-timeout -1',
            {},
            ('--pipeline-watchdog-timeout is -1.0', 'from 0 up'),
        ),
        ('--pipeline-schedule zb-v', {'num_layers': 3}, ('3 layers', '4 stages', '--num-layers')),
        ('--pipeline-schedule zb-h1', {'num_layers': 1}, ('1 layers', '2 stages', '--num-layers')),
        ('--pipeline-schedule zb-v', {'num_layers': None}, ('--num-layers is missing',)),
        (
            '--pipeline-schedule zb-h1',
            {'num_virtual_stages_per_pipeline_rank': 2},
            ('zb-h1', '2 chunks', 'exactly 1'),
        ),
        (
            '--pipeline-schedule zb-v',
            {'num_layers_per_virtual_pipeline_stage': 3},
            ('--num-layers-per-virtual-pipeline-stage 3', '4 layers', 'leave it out'),
        ),
        (
            '--pipeline-schedule zb-v',
            {'pipeline_model_parallel_layout': 'Et|t|ttL'},
            ('Et|t|ttL has 3 stages', '2 pipeline ranks', 'divided by |'),
        ),
        (
            '--pipeline-schedule zb-v',
            {'pipeline_model_parallel_layout': 'Et|t|q|tL'},
            ('--pipeline-model-parallel-layout Et|t|q|tL', 'character: q'),
        ),
        ('--pipeline-schedule zb-v', {'yaml_cfg': 'a.yaml'}, ('--yaml-cfg', 'as flags')),
        (
            '--pipeline-schedule zb-v',
            {'use_checkpoint_args': True},
            ('--use-checkpoint-args', 'as flags'),
        ),
        (
            '--pipeline-schedule zb-v',
            {'decoder_first_pipeline_num_layers': 1},
            ('--decoder-first-pipeline-num-layers 1', '2 chunks', 'give a multiple'),
        ),
        (
            '--pipeline-schedule zb-v',
            {
                'decoder_last_pipeline_num_layers': 2,
                'pipeline_model_parallel_layout': 'Et|t|t|tL',
            },
            ('--pipeline-model-parallel-layout', 'drop --decoder-first-pipeline-num-layers'),
        ),
        (
            '--pipeline-schedule zb-v',
            {'decoder_last_pipeline_num_layers': 8},
            ('4 layers cannot be placed on 4 stages', '{3: 4} (layers by stage) are given'),
        ),
        (
            '--pipeline-schedule zb-interleaved',
            {'hybrid_layer_pattern': '-*|*-', 'num_layers': None},
            ('--hybrid-layer-pattern has 2 segments', 'places 4 stages'),
        ),
    ],
    ids=lambda value: '-'.join(value) if isinstance(value, dict) else None,
)
def test_refused(ranks, flags, changes, said):
    error = refused(ranks, *flags.split(), **changes)
    assert all(words in error for words in said), error


def test_one_rank_has_no_pipeline(ranks):
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', pipeline_model_parallel_size=1)
    assert found.code is None and found.result.source is None
    assert found.said.count('\n') == 1 and 'changes nothing' in found.said


def test_one_rank_takes_no_wrong_values(ranks, tmp_path):
    """As with several ranks, all at once; a plan of several ranks is right, and changes nothing."""
    from megatron_zbpp.schedules import build

    words = '--pipeline-schedule zb-v --pipeline-clip 3 --pipeline-watchdog-timeout abc'.split()
    told = parsed(ranks, *words, pipeline_model_parallel_size=1)
    assert told.code == 2 and told.said == parsed(ranks, *words).said
    assert told.said.count('\n') == 2
    name = refused(ranks, '--pipeline-schedule', 'nonsense', pipeline_model_parallel_size=1)
    assert "unknown schedule 'nonsense'" in name
    file = tmp_path / 'plan.json'
    flag = '--pipeline-schedule-file'
    assert 'plan.json' in refused(ranks, flag, file, pipeline_model_parallel_size=1)
    file.write_text(build('zb-v', 4, 8).to_json())
    found = parsed(ranks, flag, file, pipeline_model_parallel_size=1)
    assert found.code is None and found.result.source is None and 'changes nothing' in found.said


def test_deferral_of_the_embedding_is_superseded(ranks):
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', defer_embedding_wgrad_compute=True)
    assert found.code is None
    assert '--defer-embedding-wgrad-compute has no effect: the schedule places' in found.said


def numbers_of_microbatches(changes):
    from megatron_zbpp.mcore.command_line import sizes

    return sizes.microbatches(argparse.Namespace(**{**MEGATRONS, **changes}), 4)


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'global_batch_size': 8}, {4}),
        ({'global_batch_size': None}, {1}),
        ({'global_batch_size': 16, 'rampup_batch_size': ['4', '4', '100']}, {2, 8}),
        ({'global_batch_size': None, 'step_batch_size_schedule': '0:4 2B:16'}, {2, 8}),
    ],
    ids=str,
)
def test_numbers_of_microbatches(ranks, changes, expected):
    """Each schedule is built before anything starts, so that what it cannot do is said then."""
    for found in ranks(2).run(numbers_of_microbatches, changes):
        assert found == expected


def sizes_between(changes, schedule='zb-v'):
    from megatron_zbpp.mcore.command_line import sizes
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    args = argparse.Namespace(**{**MEGATRONS, **changes})
    with mock.patch.object(Programs, 'schedule') as made:
        sizes.require_every_size(args, 4, Programs(Settings(schedule)))
    return [call.args for call in made.call_args_list]


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({'global_batch_size': 16, 'rampup_batch_size': ['4', '4', '100']}, [2, 4, 6]),
        ({'global_batch_size': 16, 'rampup_batch_size': ['1', '4', '100']}, [2, 4, 6]),
        ({'global_batch_size': 8, 'eval_global_batch_size': 12}, [6]),
        ({'global_batch_size': 8, 'eval_global_batch_size': 12, 'eval_micro_batch_size': 3}, [2]),
        ({'global_batch_size': 8, 'eval_micro_batch_size': 2}, [2]),
        ({'global_batch_size': 8, 'eval_global_batch_size': 1}, []),
    ],
    ids=str,
)
def test_sizes_of_ramp_ups_and_evaluations(ranks, changes, expected):
    for found in ranks(2).run(sizes_between, changes):
        assert found == [(2, count) for count in expected]
    evaluations = 'rampup_batch_size' not in changes
    for found in ranks(2).run(sizes_between, changes, 'pipedream'):
        assert found == ([] if evaluations else [(2, count) for count in expected])


def test_all_that_is_wrong_is_told_at_once(ranks):
    """A line each, as each would be told alone, in one order; what depends on one is not asked."""
    wrong = {
        '--pipeline-message-ctas 1.5': 'give a whole number from 1 up',
        '--pipeline-watchdog-timeout abc': "is 'abc': give a number from 0 up",
        '--pipeline-message-priority hi': "give 'high' or 'group'",
        '--pipeline-clip 3': "give 'stage' or 'global'",
    }
    alone = [refused(ranks, '--pipeline-schedule', 'zb-v', *words.split()) for words in wrong]
    assert all(cure in line for line, cure in zip(alone, wrong.values(), strict=True)), alone
    words = ' '.join(reversed(wrong)).split()
    together = parsed(ranks, '--pipeline-schedule', 'zb-v', *words)
    assert together.code == 2 and together.said == ''.join(alone)
    # chunks of Megatron's own flags beside; of an unknown schedule nothing else can be said
    told = parsed(
        ranks, '--pipeline-schedule', 'zb-v', *words[:2], num_virtual_stages_per_pipeline_rank=3
    )
    assert told.said.count('\n') == 2 and told.said.endswith(alone[3])
    assert '--num-virtual-stages-per-pipeline-rank' in told.said.splitlines()[0]
    told = parsed(ranks, '--pipeline-schedule', 'zb-q', *words[:2], *words[4:6])
    assert told.said.count('\n') == 2 and 'unknown schedule' in told.said, told


def test_what_argparse_refuses_is_told_beside(ranks):
    """Megatron's own flags, and flags without a value; what depends on them is not asked."""
    theirs = {
        '--num-layers abc': "argument --num-layers: invalid int value: 'abc'",
        '--width': 'argument --hidden-size/--width: expected one argument',
        '--kind c': "argument --kind: invalid choice: 'c'",
        '--pipeline-trace-dir': 'argument --pipeline-trace-dir: expected one argument',
    }
    alone = [refused(ranks, *words.split()) for words in theirs]
    assert all(said in line for line, said in zip(alone, theirs.values(), strict=True)), alone
    ours = ['--pipeline-schedule', 'zb-v', '--pipeline-clip', '3']
    words = [word for flag in theirs for word in flag.split()]
    told = parsed(ranks, *words, *ours)
    assert told.code == 2 and told.said == ''.join(alone) + refused(ranks, *ours), told.said
    words[-1] = '--pipeline-schedule'
    told = parsed(ranks, *words, *ours[2:])
    assert told.said.count('\n') == 4 and '--pipeline-clip' not in told.said, told.said
    assert 'argument --pipeline-schedule: expected one argument' in told.said


def test_what_is_refused_is_told_beside_wrong_values(ranks):
    """Settings of Megatron's that no value of ours would make good, in the words of a job."""
    words = ['--pipeline-schedule', 'zb-v', '--pipeline-watchdog-timeout', 'abc']
    set_too = {'tp_comm_overlap': True}
    alone = parsed(ranks, *words[:2], **set_too).said
    assert alone.count('\n') == 1 and 'tp_comm_overlap' in alone, alone
    told = parsed(ranks, *words, **set_too)
    assert told.code == 2 and told.said == refused(ranks, *words) + alone, told
    told = parsed(ranks, *words[:2], num_virtual_stages_per_pipeline_rank=3, **set_too)
    assert told.said.count('\n') == 2 and told.said.endswith(alone), told
    # with the output layer on all ranks it would be refused, but is taken back before
    words[1] = 'slimpipe'
    told = parsed(ranks, *words, defer_embedding_wgrad_compute=True)
    assert told.said == refused(ranks, *words), told
