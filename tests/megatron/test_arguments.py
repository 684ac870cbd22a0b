"""Our flags: what they ask for is done, and what cannot work ends in one line."""

import argparse
import json
from unittest import mock

import pytest
import torch.distributed as dist
from parsed_flags import MEGATRONS, PLACED, parse, parsed, refused

from megatron_zbpp.ir import files
from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.launch.flags import FLAGS
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import build

EARLY = '--enable-optimizer-post-validation'


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
    both = refused(ranks, '--pipeline-freeze', 'all', EARLY)
    assert ' are about a --pipeline-schedule: give that, too' in both


@pytest.mark.parametrize(
    ('flag', 'changes', 'said'),
    [
        (EARLY, {'rerun_mode': 'validate_results'}, '--rerun-mode disabled, or all ranks would'),
        ('', {'defer_embedding_wgrad_compute': True}, 'compute has no effect: the schedule places'),
    ],
)
def test_what_is_superseded_is_said_once(ranks, flag, changes, said):
    """On one rank of all: `of_all` holds that the others say nothing."""
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', *flag.split(), **changes)
    assert found.code is None and found.said.count(said) == 1


def test_one_rank_takes_no_wrong_values(ranks, tmp_path):
    """As with several ranks, all at once; what is right, as a plan of several, changes nothing."""
    one, file = {'pipeline_model_parallel_size': 1}, tmp_path / 'plan.json'
    words = '--pipeline-schedule zb-v --pipeline-clip 3 --pipeline-watchdog-timeout abc'.split()
    told = parsed(ranks, *words, **one)
    assert told.code == 2 and told.said == parsed(ranks, *words).said
    assert told.said.count('\n') == 2
    assert "unknown schedule 'zb-x'" in refused(ranks, '--pipeline-schedule', 'zb-x', **one)
    assert 'plan.json' in refused(ranks, '--pipeline-schedule-file', file, **one)
    file.write_text(build('zb-v', 4, 8).to_json())
    for given in (words[:2], ['--pipeline-schedule-file', file]):
        found = parsed(ranks, *given, **one)
        assert found.code is None and found.result.source is None
        assert found.said.count('\n') == 1 and 'changes nothing' in found.said


def sizes_of(**changes):
    from megatron_zbpp.mcore.job.sizes import Sizes

    return Sizes(argparse.Namespace(**{**MEGATRONS, **changes}))


EVALUATED = {'global_batch_size': 8, 'eval_global_batch_size': 12}


@pytest.mark.parametrize(
    ('changes', 'trained', 'others'),
    [
        ({'global_batch_size': 8}, [4], []),
        ({'global_batch_size': None}, [1], []),
        ({'global_batch_size': None, 'step_batch_size_schedule': '0:4 2B:16'}, [2, 8], []),
        ({'global_batch_size': 16, 'rampup_batch_size': ['4', '4', '100']}, [2, 8], [2, 4, 6]),
        ({'global_batch_size': 16, 'rampup_batch_size': ['1', '4', '100']}, [8], [2, 4, 6]),
        (EVALUATED, [4], [6]),
        (EVALUATED | {'eval_micro_batch_size': 3}, [4], [2]),
        ({'global_batch_size': 8, 'eval_micro_batch_size': 2}, [4], [2]),
        (EVALUATED | {'eval_global_batch_size': 1}, [4], []),
    ],
    ids=str,
)
def test_numbers_of_microbatches(changes, trained, others):
    """Each schedule is built before anything starts, so that what it cannot do is said then; also
    of ramp-ups and evaluations. Those of an asynchronous schedule drain, by another one."""
    sizes = sizes_of(**changes)
    assert sizes.microbatches(4) == trained
    for schedule, evaluates in (('zb-v', True), ('pipedream', False)):
        with mock.patch.object(Programs, 'schedule') as made:
            sizes.require_every_size(4, Programs(Settings(schedule)))
        asked = evaluates or 'rampup_batch_size' in changes
        assert [call.args[1] for call in made.call_args_list] == others * asked


def test_all_that_is_wrong_is_told_at_once(ranks):
    """A line each, as each would be told alone, in one order; what depends on one is not asked."""
    wrong = {  # in the order of the table of options
        '--pipeline-clip 3': "give 'stage' or 'global'",
        '--pipeline-message-ctas 1.5': 'give a whole number from 1 up',
        '--pipeline-message-priority hi': "give 'high' or 'group'",
        '--pipeline-watchdog-timeout abc': "is 'abc': give a number from 0 up",
    }
    alone = [refused(ranks, '--pipeline-schedule', 'zb-v', *words.split()) for words in wrong]
    assert all(cure in line for line, cure in zip(alone, wrong.values(), strict=True)), alone
    words = ' '.join(reversed(wrong)).split()
    together = parsed(ranks, '--pipeline-schedule', 'zb-v', *words)
    assert together.code == 2 and together.said == ''.join(alone)
    # chunks of Megatron's own flags beside, and an unknown schedule
    told = parsed(
        ranks, '--pipeline-schedule', 'zb-v', *words[6:], num_virtual_stages_per_pipeline_rank=3
    )
    assert told.said.count('\n') == 2 and told.said.endswith(alone[0])
    assert '--num-virtual-stages-per-pipeline-rank' in told.said.splitlines()[0]
    told = parsed(ranks, '--pipeline-schedule', 'zb-q', *words[6:], *words[:2])
    assert told.said.count('\n') == 3 and 'unknown schedule' in told.said, told


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


def test_megatrons_list_of_arguments_has_no_flags_of_other_forks():
    """Which would look switched off while a schedule of ours runs."""
    from megatron_zbpp.launch import flags

    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    ours = {each.dest for each in flags.FLAGS}
    assert vars(parser.parse_args([])).keys() == ours
    named = vars(parser.parse_args(['--enable-zero-bubble']))
    assert named.keys() == {*ours, 'enable_zero_bubble'} and named['enable_zero_bubble'] is True


ZERO_BUBBLE_V = '--zero-bubble-v-schedule'
MOST = '--zero-bubble-max-pending-backward'
# flags of other forks: the schedule that they mean, and a limit of memory
ALIASES = {
    '--enable-zero-bubble': 'zb-1p',
    f'--enable-zero-bubble {MOST} 4': 'zb-1p --pipeline-schedule-memory-limit 4.0',
    f'--enable-zero-bubble {MOST} auto': 'zb-1p',
    ZERO_BUBBLE_V: 'zb-v',
    f'--enable-zero-bubble {ZERO_BUBBLE_V}': 'zb-v',
    f'{ZERO_BUBBLE_V} --zero-bubble-v-schedule-mem-setup zb': 'zb-v',
    f'{ZERO_BUBBLE_V} --zero-bubble-v-schedule-mem-setup half': 'v-half',
    f'{ZERO_BUBBLE_V} --zero-bubble-v-schedule-mem-setup min': 'v-min',
    '--enable-1f1b-v': '1f1b-v',
    '--enable-zbh1-pipeline': 'zb-h1',
    '--enable-zbh1-pipeline --pipeline-schedule zb-h1': 'zb-h1',
}


@pytest.mark.parametrize(('flags', 'meant'), ALIASES.items())
def test_aliases(ranks, flags, meant):
    found, instead = parsed(ranks, *flags.split()), f'--pipeline-schedule {meant}'
    name, *limit = meant.split()
    assert found.result.source == (name, None, float(limit[1]) if limit else None)
    assert found.said == f'megatron_zbpp: deprecated flags: use {instead}\n'
    again = parsed(ranks, *instead.split())
    assert again.result == found.result and not again.said


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--enable-zb-runtime', 'every --pipeline-schedule has its runtime'),
        ('--offload-time 4', '--pipeline-offload auto measures how long copies take'),
        ('--auto-offload-time', '--pipeline-offload auto measures how long copies take'),
        ('--interleave-group-size 4', 'a schedule has its own order of microbatches'),
        ('--allow-padding-num-layers', 'layers need not divide among the stages'),
        ('--enable-exactly-numeric-match', 'all numbers match exactly, always'),
        ('--zero-bubble-pipeline-timers-end-iter 9', '--pipeline-schedule-profile-iters'),
        (f'{MOST} 4', 'a limit for --enable-zero-bubble alone'),
    ],
)
def test_needless_aliases(ranks, flags, said):
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', *flags.split())
    assert found.result.source == ('zb-v', None, None)
    assert found.said.startswith(f'megatron_zbpp: {flags.split()[0]} ')
    assert found.said.count('\n') == 1 and 'has no effect' in found.said and said in found.said


def test_chunks_to_offload(ranks):
    """`--offload-chunk-num` of the research fork is our --pipeline-offload."""
    found = parsed(ranks, '--pipeline-schedule', 'zb-v', '--offload-chunk-num', 1)
    assert found.code is None, found.said
    assert found.said == 'megatron_zbpp: deprecated flags: use --pipeline-offload 1\n'


def schedule_file(folder, drop=0):
    """ZB-V in a file, without its last passes on rank 0."""
    rows = to_torch_csv(build('zb-v', 2, 4)).splitlines()
    if drop:
        rows[0] = ','.join(rows[0].split(',')[:-drop])
    path = folder / 'schedule.csv'
    path.write_text('\n'.join(rows))
    return path


def test_file(ranks, tmp_path):
    found = parsed(ranks, '--pipeline-schedule-file', schedule_file(tmp_path))
    assert found.code is None and found.result.source.name == 'schedule'
    assert found.result.placed['pipeline_model_parallel_layout'] == 'Et|t|t|tL'


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
    error = refused(ranks, *flags, rampup_batch_size=['2', '2', '8'])
    assert 'for 4 microbatches, not 2: change' in error
    error = refused(ranks, *flags, eval_global_batch_size=6)
    assert '--eval-global-batch-size gives batches of 6, 6 microbatches: schedule' in error
    assert 'for 4 microbatches, not 6: change' in error
    error = refused(ranks, *flags, eval_micro_batch_size=2)
    assert '--eval-micro-batch-size gives batches of 4, 2 microbatches: schedule' in error
    evaluations = {'eval_global_batch_size': 8, 'eval_micro_batch_size': 2}
    for none in (evaluations, {'eval_global_batch_size': 6, 'eval_iters': 0}):
        assert parsed(ranks, *flags, **none).code is None
    error = refused(ranks, *flags, eval_global_batch_size=6, eval_iters=0, full_validation=True)
    assert 'for 4 microbatches, not 6: change' in error
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
    said = {'name': 'makes 2 ways through the ranks, not 1: say', 'file': 'give an even number'}
    assert said[given] in refused(ranks, *flags)


def plan_file(folder, layout='Ettt|tL'):
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
    ('layout', 'said'), [('Ettt|tmL', '--mtp-num-layers 0'), (3, 'layout 3 is not a text')]
)
def test_a_plan_of_another_model(ranks, tmp_path, layout, said):
    assert said in refused(ranks, '--pipeline-schedule-file', plan_file(tmp_path, layout))


def test_more_layers_are_given_than_there_are(ranks):
    said = refused(ranks, '--pipeline-schedule', 'zb-v', decoder_last_pipeline_num_layers=8)
    assert '{3: 4} (layers by stage) are given' in said


@pytest.mark.on_ranks(2)
def test_a_plan_is_read_once(tmp_path):
    (folder := tmp_path / str(dist.get_rank())).mkdir()
    with mock.patch.object(files, 'content_of', side_effect=files.content_of) as text:
        assert parse(['--pipeline-schedule-file', plan_file(folder)], {}).code is None
    assert text.call_count == 1


_, EMBEDDING, LOSS, BY_LAYERS, CHUNKS = PLACED
FIRST, LAST = 'decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers'


@pytest.mark.parametrize(
    ('schedule', 'changes', 'expected'),
    [
        ('zb-h1', {}, None),
        ('zb-h1', {'num_layers': 5}, 'Ettt|ttL'),
        ('zb-v', {}, 'Et|t|t|tL'),
        ('zb-v', {'num_layers': 6}, 'Et|tt|tt|tL'),
        ('zb-v', {'num_layers': 6, EMBEDDING: True, LOSS: True}, 'Et|tt|tt|tL'),
        ('zb-h1', {'num_layers': 6, EMBEDDING: True, LOSS: True}, None),
        ('zb-v', {'pipeline_model_parallel_layout': 'E|tt|t|tL'}, 'E|tt|t|tL'),
        ('zb-v', {BY_LAYERS: 1}, 'Et|t|t|tL'),
        ('zb-v', {CHUNKS: 2}, 'Et|t|t|tL'),
        ('interleaved', {'num_layers': 8}, 'Ett|tt|tt|ttL'),
        ('interleaved', {'num_layers': 8, BY_LAYERS: 1}, 'Et|t|t|t|t|t|t|tL'),
        ('interleaved', {'num_layers': 7, BY_LAYERS: 1, LOSS: True}, 'Et|t|t|t|t|t|t|L'),
        ('zb-v', {'num_layers': 7, FIRST: 2}, 'Et|tt|tt|ttL'),
        ('interleaved', {'num_layers': 8, CHUNKS: 2, LAST: 2}, 'Ettt|t|ttt|tL'),
        ('zb-h1', {'num_layers': 7, FIRST: 3}, None),
        ('zb-v', {'num_layers': 7, 'mtp_num_layers': 1}, 'Ett|tt|tt|tmL'),
    ],
    ids=str,
)
def test_layers_are_placed(ranks, schedule, changes, expected):
    found = parsed(ranks, '--pipeline-schedule', schedule, **changes)
    assert found.code is None, found.said
    assert found.result.placed['pipeline_model_parallel_layout'] == expected
    if expected is None:  # Megatron's own
        given = {name: value for name, value in changes.items() if name in PLACED}
        assert given.items() <= found.result.placed.items()
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
    sizes = sizes_of(hybrid_layer_pattern=pattern)
    placed = sizes.with_(sizes.placed(Programs(Settings(schedule)).placement(2)))
    assert placed.hybrid_layer_pattern == expected
    assert placed.pipeline_model_parallel_layout is None


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
