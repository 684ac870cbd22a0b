"""Our flags: what they ask for is done, and what cannot work ends in one line."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from outcome import of_all, outcome, refusal

from megatron_zbpp.mcore.command_line.flags import FLAGS
from megatron_zbpp.schedules import build

# Megatron's own defaults of what our flags look at
MEGATRONS = {
    'num_layers': 4,
    'pipeline_model_parallel_size': 2,
    'tensor_model_parallel_size': 1,
    'context_parallel_size': 1,
    'micro_batch_size': 1,
    'global_batch_size': 4,
    'account_for_embedding_in_pipeline_split': False,
    'account_for_loss_in_pipeline_split': False,
    'pipeline_model_parallel_layout': None,
    'num_layers_per_virtual_pipeline_stage': None,
    'num_virtual_stages_per_pipeline_rank': None,
}
PLACED = (
    'pipeline_model_parallel_layout',
    'account_for_embedding_in_pipeline_split',
    'account_for_loss_in_pipeline_split',
    'num_layers_per_virtual_pipeline_stage',
    'num_virtual_stages_per_pipeline_rank',
)


@dataclass(frozen=True)
class Parsed:
    """What the plugin was enabled with, and where the layers are placed."""

    source: object
    placed: dict[str, object]


def parse(flags, changes):
    """On each rank: our flags behind a parser that stands for Megatron's, on two ranks."""
    from megatron_zbpp.mcore import enabled
    from megatron_zbpp.mcore.command_line import arguments
    from megatron_zbpp.mcore.command_line import flags as ours

    parser = argparse.ArgumentParser()
    ours.add_arguments(parser)
    parser.set_defaults(**{**MEGATRONS, **changes})
    parser.parse_known_args = arguments._preparing(parser.parse_known_args)
    enabled.plugin = None
    with mock.patch.object(sys, 'argv', ['script.py']):
        found = outcome(parser.parse_args, list(map(str, flags)))
    plugin = enabled.plugin
    if plugin is not None:
        plugin.disable()
    if found.code is not None:
        return found
    placed = {name: getattr(found.result, name) for name in PLACED}
    source = plugin and plugin.session.programs.source
    if isinstance(source, tuple):  # of a family, of whole sequences
        source = source[:-1] if source[-1] == 1 else source
    return replace(found, result=Parsed(source, placed))


def parsed(ranks, *flags, **changes):
    return of_all(ranks(2).run(parse, flags, changes))


def refused(ranks, *flags, **changes):
    return refusal(parsed(ranks, *flags, **changes))


def test_megatrons_list_of_arguments_has_no_flags_of_other_forks():
    """Which would look switched off while a schedule of ours runs."""
    from megatron_zbpp.mcore.command_line import aliases

    parser = argparse.ArgumentParser()
    aliases.add_aliases(parser)
    assert vars(parser.parse_args([])) == {}
    assert vars(parser.parse_args(['--enable-zero-bubble'])) == {'enable_zero_bubble': True}


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


def schedule_file(folder, p=2, m=4, drop=0):
    """ZB-V in a file, without its last passes on rank 0."""
    from megatron_zbpp.ir.formats import to_torch_csv

    rows = to_torch_csv(build('zb-v', p, m)).splitlines()
    if drop:
        rows[0] = ','.join(rows[0].split(',')[:-drop])
    path = folder / 'schedule.csv'
    path.write_text('\n'.join(rows))
    return path


def test_file(ranks, tmp_path):
    found = parsed(ranks, '--pipeline-schedule-file', schedule_file(tmp_path))
    assert found.code is None and found.result.source.name == 'schedule'
    assert found.result.placed['pipeline_model_parallel_layout'] == 'Et|t|t|tL'


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


def test_refused_files(ranks, tmp_path):
    path = tmp_path / 'schedule.csv'
    flags = ['--pipeline-schedule-file', path]
    error = refused(ranks, *flags)
    assert 'No such file' in error and str(path) in error
    path.write_text('0F0,oops')
    error = refused(ranks, *flags)
    assert f"{path}: row 0, column 1: 'oops' is not an action" in error and 'such as' in error
    path.write_text('{"schedule": 1}')
    assert str(path) in refused(ranks, *flags)
    schedule_file(tmp_path)
    error = refused(ranks, *flags, '--pipeline-schedule', 'zb-v')
    assert 'zb-v' in error and str(path) in error and 'give one of them' in error
    error = refused(ranks, *flags, global_batch_size=6)
    assert 'for 4 microbatches, not 6: change' in error
    error = refused(ranks, *flags, rampup_batch_size=['2', '2', '8'])
    assert 'for 4 microbatches, not 2: change' in error
    schedule_file(tmp_path, p=3)
    assert 'for 3 pipeline ranks, not 2: change' in refused(ranks, *flags)
    schedule_file(tmp_path, drop=1)
    assert '`zbpp check` shows the place' in refused(ranks, *flags)


@pytest.mark.parametrize('given', ['name', 'file'])
def test_two_routes_of_another_size(ranks, tmp_path, given):
    """Before a model is built: one chunk of each stage would train on half of the microbatches."""
    flags = ['--pipeline-schedule', 'two_ways:two-ways']
    if given == 'file':
        path = tmp_path / 'two-ways.json'
        path.write_text(build(flags[1], 2, 4).to_json())
        flags = ['--pipeline-schedule-file', path]
    said = (
        'makes 2 ways through the ranks, not 1: say' if given == 'name' else 'give an even number'
    )
    assert said in refused(ranks, *flags)


def test_one_rank_has_no_pipeline(ranks):
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', pipeline_model_parallel_size=1)
    assert found.code is None and found.result.source is None
    assert found.said.count('\n') == 1 and 'changes nothing' in found.said


@pytest.mark.parametrize(
    ('schedule', 'changes', 'expected'),
    [
        ('zb-h1', {}, None),
        ('zb-h1', {'num_layers': 5}, 'Ettt|ttL'),
        ('zb-v', {}, 'Et|t|t|tL'),
        ('zb-v', {'num_layers': 6}, 'Et|tt|tt|tL'),
        (
            'zb-v',
            {'num_layers': 6, 'account_for_embedding_in_pipeline_split': True}
            | {'account_for_loss_in_pipeline_split': True},
            'Et|tt|tt|tL',
        ),
        (
            'zb-h1',
            {'num_layers': 6, 'account_for_embedding_in_pipeline_split': True}
            | {'account_for_loss_in_pipeline_split': True},
            None,
        ),
        ('zb-v', {'pipeline_model_parallel_layout': 'E|tt|t|tL'}, 'E|tt|t|tL'),
        ('zb-v', {'num_layers_per_virtual_pipeline_stage': 1}, 'Et|t|t|tL'),
        ('zb-v', {'num_virtual_stages_per_pipeline_rank': 2}, 'Et|t|t|tL'),
        ('interleaved', {'num_layers': 8}, 'Ett|tt|tt|ttL'),
        (
            'interleaved',
            {'num_layers': 8, 'num_layers_per_virtual_pipeline_stage': 1},
            'Et|t|t|t|t|t|t|tL',
        ),
        (
            'interleaved',
            {'num_layers': 7, 'num_layers_per_virtual_pipeline_stage': 1}
            | {'account_for_loss_in_pipeline_split': True},
            'Et|t|t|t|t|t|t|L',
        ),
        ('zb-v', {'num_layers': 7, 'decoder_first_pipeline_num_layers': 2}, 'Et|tt|tt|ttL'),
        (
            'interleaved',
            {'num_layers': 8, 'num_virtual_stages_per_pipeline_rank': 2}
            | {'decoder_last_pipeline_num_layers': 2},
            'Ettt|t|ttt|tL',
        ),
        ('zb-h1', {'num_layers': 7, 'decoder_first_pipeline_num_layers': 3}, None),
        ('zb-v', {'num_layers': 7, 'mtp_num_layers': 1}, 'Ett|tt|tt|tmL'),
    ],
    ids=str,
)
def test_layers_are_placed(ranks, schedule, changes, expected):
    found = parsed(ranks, '--pipeline-schedule', schedule, **changes)
    assert found.code is None, found.said
    assert found.result.placed['pipeline_model_parallel_layout'] == expected
    if expected is None:  # Megatron's own
        assert found.result.placed == {
            **found.result.placed,
            **{k: v for k, v in changes.items() if k in PLACED},
        }
    else:
        assert not any(value for name, value in found.result.placed.items() if 'layout' not in name)


@pytest.mark.parametrize(
    ('schedule', 'pattern', 'expected'),
    [
        ('zb-v', '*-*-*-/MM', '*|-*|-*|-/MM'),
        ('zb-v', '*|-|*|-', '*|-|*|-'),
        ('zb-h1', '*-*-', '*-*-'),
        ('zb-interleaved', '*-*-', '*|-|*|-'),
    ],
)
def test_a_hybrid_pattern_is_divided(schedule, pattern, expected):
    from megatron_zbpp.mcore.command_line import sizes
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.settings import Settings

    args = argparse.Namespace(**MEGATRONS, hybrid_layer_pattern=pattern)
    sizes.place_layers(args, Programs(Settings(schedule)).placement(2))
    assert args.hybrid_layer_pattern == expected
    assert args.pipeline_model_parallel_layout is None


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


@pytest.mark.parametrize(
    ('schedule', 'pattern', 'chunks'),
    [('zb-h1', '-*|*-/*-', None), ('zb-h1', '-*-*', None), ('zb-interleaved', '-|*|-|*', 2)],
)
def test_layers_of_hybrid_models_are_where_their_pattern_says(ranks, schedule, pattern, chunks):
    found = parsed(
        ranks, '--pipeline-schedule', schedule, hybrid_layer_pattern=pattern, num_layers=None
    )
    assert found.code is None and found.result.source == (schedule, chunks, None)
    assert found.result.placed == {name: MEGATRONS[name] for name in PLACED}


def plan_file(folder, layout='Ettt|tL'):
    """A plan of two ranks and four microbatches."""
    from megatron_zbpp.schedules import build

    path = folder / 'plan.json'
    schedule = json.loads(build('zb-h1', 2, 4).to_json())
    path.write_text(json.dumps({'layout': layout, 'cuts': [4, 2], 'schedule': schedule}))
    return path


def test_a_plan_brings_its_layout(ranks, tmp_path):
    plan = ['--pipeline-schedule-file', plan_file(tmp_path)]
    for given in (None, 'Ettt|tL', 'Et*3|tL'):
        found = parsed(ranks, *plan, pipeline_model_parallel_layout=given)
        assert found.code is None and 'layers as the plan has them: Ettt|tL' in found.said
        assert found.result.placed['pipeline_model_parallel_layout'] == 'Ettt|tL'


@pytest.mark.parametrize(
    ('layout', 'changes', 'said'),
    [
        ('Ett|tL', {}, '--num-layers 4, but the layout Ett|tL of'),
        ('Ettt|tmL', {}, '--mtp-num-layers 0'),
        ('ttt|t', {}, 'with E first and L last'),
        ('Ettt|tL', {'pipeline_model_parallel_layout': 'Ett|ttL'}, 'leave the flag out'),
        (3, {}, 'layout 3 is not a text'),
    ],
)
def test_a_plan_of_another_model(ranks, tmp_path, layout, changes, said):
    plan = plan_file(tmp_path, layout)
    assert said in refused(ranks, '--pipeline-schedule-file', plan, **changes)


def reads(plan):
    """How often its file is read while the flags are."""
    from megatron_zbpp.ir import formats

    with mock.patch.object(formats, '_text', side_effect=formats._text) as text:
        assert parse(['--pipeline-schedule-file', plan], {}).code is None
    return text.call_count


def test_a_plan_is_read_once(ranks, tmp_path):
    assert ranks(2).run(reads, plan_file(tmp_path)) == [1, 1]


def test_a_plan_that_counts_on_selective_recomputation(ranks, tmp_path):
    plan = plan_file(tmp_path)
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {'selective': True}))
    words = ['--pipeline-schedule-file', plan]
    assert 'give --recompute-granularity selective' in refused(ranks, *words)
    assert parsed(ranks, *words, recompute_granularity='selective').code is None


def test_a_file_keeps_its_chunks(ranks, tmp_path):
    """Whatever flags say of them; that they say the same is no error."""
    file = ['--pipeline-schedule-file', schedule_file(tmp_path)]
    found = parsed(ranks, *file, pipeline_model_parallel_layout='Et|t|t|tL')
    assert found.code is None
    assert 'ask for 1 chunks' in refused(ranks, *file, pipeline_model_parallel_layout='Ett|ttL')
