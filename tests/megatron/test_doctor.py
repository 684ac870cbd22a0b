"""`zbpp doctor`: installation, patches, launch lines."""

import argparse
import json
import os
import sys
from pathlib import Path
from unittest import mock

import forked
import pytest
import torch
from command_lines import ended
from commands import run
from nvidia import CHECKOUT, needs_training
from tables import rows_of

from megatron_zbpp.analysis import gain
from megatron_zbpp.ir.formats import UNITS, memory_of_plan
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.schedules import build

SIZES = '--num-layers 22 --hidden-size 64 --num-attention-heads 4 --seq-length 64'.split()
SIZES += '--micro-batch-size 2 --pipeline-model-parallel-size 8'.split()
ENDS = ['--account-for-embedding-in-pipeline-split', '--account-for-loss-in-pipeline-split']
SIZES += ENDS
LAUNCHER = ['-m', 'megatron_zbpp.launch']
OVERLAP, CONNECTIONS = '--overlap-moe-expert-parallel-comm', 'CUDA_DEVICE_MAX_CONNECTIONS'
LINE = [*SIZES, '--global-batch-size', '48', '--pipeline-schedule']


def line(*more, schedule='zb-v', gpus=8, batch=48):
    given = [*SIZES, '--global-batch-size', batch, '--pipeline-schedule', schedule, *more]
    return ['--gpus', gpus, '--', *given]


def doctor(words, training=False):
    """Exit code, what it printed, and what it complained of; on each rank."""
    from megatron_zbpp.launch import launch_line

    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    lacks = '' if training else 'megatron.training is not here'
    found = mock.patch.object(launch_line, '_lacks', lambda: lacks)
    alone = mock.patch.dict(os.environ)
    paths = mock.patch.object(sys, 'path', [*sys.path])  # doctor looks beside the script first
    with found, alone, paths:
        del os.environ['WORLD_SIZE']
        return ended(['doctor', *map(str, words)], notes=True)


def report(ranks, *words, training=False):
    (code, out, errors), _ = ranks(2).run(doctor, ['--json', *words], training)
    assert not errors, errors
    return code, json.loads(out)


def refusal(ranks, *words):
    (code, out, errors), _ = ranks(2).run(doctor, words)
    assert code == 2 and not out and errors and '\n' not in errors, (code, out, errors)
    return errors


def test_command():
    """As users call it: a process of its own, without a launcher."""
    zbpp = Path(sys.executable).with_name('zbpp')
    words = [*LINE, 'zb-v']
    done = run([zbpp, 'doctor', '--', *words])
    assert done.returncode == 0 and not done.stderr, done.stderr
    for said in ('megatron-core', 'python', 'all take effect', 'rank 0: stage 7: 2, stage 8: 1'):
        assert said in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == 'schedule: zb-v', 'what was asked for comes first'
    assert '(F = B = W = 1 on a mean rank, by layers, simulated)' in lines[2]
    assert ', idle GPU time 6.1%; window ' in lines[2] and '% less time than 1f1b' in lines[2]
    assert lines[3] == MEANING
    assert 'parallel_state.initialize_model_parallel' not in done.stdout
    told = forked.run([zbpp, 'doctor', '--verbose', '--', *words]).stdout
    assert '  megatron.core.parallel_state.initialize_model_parallel\n' in told


@pytest.mark.on_ranks(1)
def test_what_is_looked_at_is_told():
    """It answers in seconds: it simulates the schedule and 1F1B once each, and starts no job."""
    from megatron_zbpp.launch.doctor import examine
    from megatron_zbpp.mcore import training_log

    told, simulated = [], []

    def counted(schedule, costs):
        simulated.append(sum(map(len, schedule.passes)))
        return simulate(schedule, costs)

    simulate, starts = training_log.simulate, AssertionError('doctor starts nothing')
    words = [*SIZES, '--num-layers', '64', '--pipeline-model-parallel-size', '16']
    with (
        mock.patch.object(training_log, 'simulate', counted),
        mock.patch.object(gain, 'simulate', counted),
        mock.patch('torch.distributed.new_group', side_effect=starts),
        mock.patch('torch.distributed.init_process_group', side_effect=starts),
        mock.patch('subprocess.Popen', side_effect=starts),
    ):
        given = ['--global-batch-size', '512', '--pipeline-schedule', 'zb-v']
        examine([*words, *given], 16, told.append)
    assert [text.split()[0] for text in told] == ['importing', 'reading', 'looking']
    assert sorted(simulated) == [16 * 256 * 2, 2 * 16 * 256 * 3], 'F and BW of 1F1B'


def test_a_plan_is_simulated_by_its_own_costs(ranks, tmp_path):
    """Doctor and `zbpp simulate` say the same; of a plan of an older release what it lacks."""
    from megatron_zbpp import Costs, build, simulate

    made = build('zb-h1', 2, 4)
    costs = Costs.of([1, 4], [1, 4], [1, 4], comm=0.5)
    fields = {'makespan': 0, 'schedule': json.loads(made.to_json())}
    plan, old = tmp_path / 'plan.json', tmp_path / 'old.json'
    plan.write_text(json.dumps(fields | memory_of_plan(costs, UNITS)))
    old.write_text(json.dumps(fields))
    words = [*SIZES[:8], '--micro-batch-size', 2, '--global-batch-size', 8]
    words += ['--pipeline-model-parallel-size', 2, '--pipeline-schedule-file']
    _, found = report(ranks, '--gpus', 2, '--', *words, plan)
    (ours,) = found['launch_line']['iterations']
    assert ours['planned'] and ours['makespan'] == simulate(made, costs).makespan
    (_, text, _), _ = ranks(2).run(doctor, ['--gpus', 2, '--', *words, plan])
    assert '4 microbatches (costs of the plan, simulated): makespan ' in text
    (_, text, errors), _ = ranks(2).run(doctor, ['--gpus', 2, '--', *words, old])
    assert '(F = B = W = 1, simulated)' in text
    assert 'a plan of an older release, which lacks the costs' in errors


def test_installation(ranks):
    code, found = report(ranks)
    assert code == 0 and found['fine'] and found['launch_line'] is None
    assert found['versions']['torch'].partition('+')[0] == torch.__version__.partition('+')[0]
    assert set(found['versions']) >= {'python', 'megatron-core', 'transformer-engine', 'apex'}
    assert found['versions']['device'] == 'CPU' or 'CUDA' in found['versions']['device']
    targets = {patch['target'] for patch in found['patches']}
    assert targets >= {
        'megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving',
        'megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication',
        'megatron.core.transformer.transformer_config.PipelineParallelLayerLayout',
        'megatron.core.parallel_state.initialize_model_parallel',
    }
    assert all(not patch['problem'] for patch in found['patches'])


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(
    ('what', 'name', 'number'),
    [
        ('function', 'forward_backward_pipelining_with_interleaving', 2),
        ('method', 'PipelineParallelLayerLayout', 1),
        ('gone', '_no_such_name', 1),
        ('class', 'megatron.core', 1),
    ],
)
def test_moved_upstream(what, name, number):
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    from megatron_zbpp.launch import doctor
    from megatron_zbpp.mcore.layers import tied

    own = schedules.get_forward_backward_func, TransformerConfig.__post_init__
    change = {
        'function': mock.patch.object(schedules, 'get_forward_backward_func', lambda: None),
        'method': mock.patch.object(TransformerConfig, '__post_init__', lambda self: None),
        'gone': mock.patch.object(tied, 'SUM', '_no_such_name'),
        'class': mock.patch.dict(sys.modules, {'megatron_zbpp.mcore.plugin': None}),
    }
    with change[what]:
        problems = {p.target: p.problem for p in doctor.patches() if p.problem}
    assert own == (schedules.get_forward_backward_func, TransformerConfig.__post_init__)
    assert len(problems) == number
    assert any(name in target for target in problems), problems
    assert all('Traceback' not in problem for problem in problems.values())


def test_plan(ranks):
    code, found = report(ranks, *line())
    told = found['launch_line']
    assert code == 0 and told['schedule'] == 'zb-v' and told['refused'] == []
    assert told['parallel'] == {'GPUs': 8, 'tensor': 1, 'context': 1, 'pipeline': 8, 'data': 1}
    assert told['stages'][0] == [7, 8] and told['stages'][7] == [0, 15]
    assert told['layers'] == [1, *[2] * 7, *[1] * 7, 0]
    (iteration,) = told['iterations']
    assert iteration['microbatches'] == 24
    # of layers as they are; equal stages have the 4.6 % of docs/choosing.md
    assert round(iteration['idle_busiest_rank'], 3) == 0.061 and iteration['window'] > 72
    assert 'megatron.training is not here' in told['notes'][0]


ZB_V = ['pretrain_gpt.py', *LINE, 'zb-v']
DUALPIPE_V = [*LAUNCHER, 'pretrain_gpt.py', *LINE, 'dualpipe-v']
TOGETHER = 'the first iteration is prepared on all ranks at the same time'
IN_TURN = 'the first iteration is prepared rank after rank: '


NOTES = {
    'GPUs': ([*LAUNCHER, *ZB_V], f'{TOGETHER} (--pipeline-prewarm)', 1),
    'in turn': ([*LAUNCHER, *ZB_V, '--no-pipeline-prewarm'], f'{IN_TURN}drop --no-pipeline-pre', 1),
    'a CPU': ([*LAUNCHER, '--cpu', *ZB_V], f'{IN_TURN}give --pipeline-prewarm', 1),
    'a CPU, at once': ([*LAUNCHER, '--cpu', *ZB_V, '--pipeline-prewarm'], TOGETHER, 1),
    'none': ([ZB_V[0], *SIZES], 'no --pipeline-schedule is given: ', 1),
    'zb-v': ([ZB_V[0], *SIZES, *LINE[-1:], 'zb-v'], 'no --pipeline-schedule is given: ', 0),
    'experts': pytest.param(DUALPIPE_V, CONNECTIONS, 0, marks=needs_training),
    'overlapped': pytest.param([*DUALPIPE_V, OVERLAP], CONNECTIONS, 1, marks=needs_training),
}


@pytest.mark.parametrize(('words', 'note', 'times'), NOTES.values(), ids=NOTES)
def test_notes(ranks, words, note, times):
    """How the first iteration is prepared; no schedule; what overlapped experts need."""
    _, found = report(ranks, '--gpus', 8, '--', *words)
    assert [note in each for each in found['launch_line']['notes']].count(True) == times


def test_what_an_offload_frees(ranks):
    """As `zbpp simulate` has it; where it is of little use, that is said; as recomputation is."""

    def told(schedule, *more):
        code, found = report(ranks, *line(*more, schedule=schedule))
        (iteration,) = found['launch_line']['iterations']
        assert code == 0
        return max(iteration['peaks']), found['launch_line']['notes'][-1]

    held, note = told('po', '--pipeline-offload', 'half')
    assert held == 3 and note.startswith('offload: 3 activations at most on a rank, 6.5 without')
    assert note.endswith(' on the host')
    assert 'W needs most until it has run; po and' in told('zb-h1', '--pipeline-offload', 'all')[1]
    assert told('gpipe', '--pipeline-recompute', 'all')[0] == 1
    assert 'offload of 3 chunks: a rank has 2' in refusal(ranks, *line('--pipeline-offload', 3))


SHARED = ['--tensor-model-parallel-size', 8, '--num-attention-heads', 8]


@pytest.mark.parametrize(
    ('words', 'activation', 'retained'),
    [
        (['--bf16'], 34, 32),
        ([*SHARED, '--bf16'], 13, 11),
        ([*SHARED, '--bf16', '--sequence-parallel'], 4.25, 4),
        (['--bf16', '--recompute-granularity', 'full'], 2, 32),
        (['--swiglu', '--ffn-hidden-size', 128], 58, 56),
        (['--num-experts', 2], None, None),
    ],
    ids=lambda value: ' '.join(map(str, value)) if isinstance(value, list) else '',
)
def test_layer(ranks, words, activation, retained):
    """What it holds from F to B, and what waits for W, which may be more."""
    _, found = report(ranks, *line(*words, gpus=64))
    layer = found['launch_line']['layer']
    if activation is None:
        assert layer is None
        return
    assert layer['unit'] == 64 * 2 * 64
    held = [layer[name] / layer['unit'] for name in ('activation', 'retained')]
    assert held == pytest.approx([activation, retained])
    (_, out, _), _ = ranks(2).run(doctor, line(*words, gpus=64))
    assert f'holds about {activation:.4g} s·b·h' in out
    assert f'{retained:.4g} s·b·h (' in out and 'between B and W' in out


@pytest.mark.parametrize(
    ('words', 'gpus', 'microbatches'),
    [
        (['torchrun', '--nproc-per-node', '8', '--nnodes=4', 'pretrain_gpt.py'], 32, [12]),
        (['--rampup-batch-size', '16', '16', '100'], 8, [8, 48]),
    ],
    ids=['torchrun', 'ramp-up'],
)
def test_numbers(ranks, words, gpus, microbatches):
    batch = ['--global-batch-size', 96, '--pipeline-schedule', 'zb-h1']
    _, found = report(ranks, '--', *words, *SIZES, *batch)
    line = found['launch_line']
    assert line['parallel']['GPUs'] == gpus
    assert [each['microbatches'] for each in line['iterations']] == microbatches
    assert line['layers'] == [2, 3, 3, 3, 3, 3, 3, 2]


def test_sizes_of_evaluations(ranks, tmp_path):
    """A plan is for one number of microbatches; a batch may be cut down to what divides."""
    path = tmp_path / 'plan.json'
    path.write_text(build('zb-h1', 8, 4).to_json())
    words = ['--gpus', 16, '--', *SIZES, '--pipeline-schedule-file', path]
    words += ['--global-batch-size', 16]
    assert report(ranks, *words)[0] == 0
    said = refusal(ranks, *words, '--eval-global-batch-size', 24)
    assert '--eval-global-batch-size gives batches of 24, 6 microbatches: ' in said
    assert 'is for 4 microbatches, not 6: change' in said
    words[-1] = 19
    assert 'does not divide by 4' in refusal(ranks, *words)
    code, found = report(ranks, *words, '--decrease-batch-size-if-needed')
    assert code == 0 and found['launch_line']['iterations'][0]['microbatches'] == 4


def test_a_script_that_is_not_there(ranks, tmp_path):
    script = tmp_path / 'pretrain_gpt.py'
    words = ['-m', 'megatron_zbpp.launch', script, *SIZES, '--pipeline-schedule', 'zb-v']
    words = ['--gpus', 8, '--', *words]
    (code, out, _), _ = ranks(2).run(doctor, words)
    assert code == 1 and out.startswith(f'refused: there is no script {script}: correct its path')
    assert 'schedule: zb-v' in out
    script.touch()
    code, found = report(ranks, *words)
    assert code == 0 and not found['missing_script']


def test_refused(ranks):
    launch = ['torchrun', '--nproc-per-node', '8', '-m', 'megatron_zbpp.launch', '--cpu', 'gpt.py']
    given = ['--pipeline-schedule', 'zb-v', '--tp-comm-overlap', '--fp8-format', 'hybrid']
    silent = ['--tensor-parallel-num-weight-shards', 2, '--reset-attention-mask']
    code, found = report(ranks, '--', *launch, *SIZES, '--global-batch-size', 48, *given, *silent)
    assert code == 1 and not found['fine']
    refused = {entry['setting']: entry for entry in found['launch_line']['refused']}
    named = {'tp_comm_overlap', 'fp8', 'tensor_parallel_num_weight_shards', 'reset_attention_mask'}
    assert set(refused) == named
    assert refused['tp_comm_overlap']['cure'].startswith('drop --tp-comm-overlap, or take')
    assert 'Transformer Engine' in refused['fp8']['reason'] and refused['fp8']['value'] == 'hybrid'
    words = ['--', *SIZES, '--global-batch-size', 48, *given]
    (code, out, _), _ = ranks(2).run(doctor, words)
    assert code == 1
    assert 'refused: tp_comm_overlap=True: Transformer Engine' in out
    assert 'fp8' not in out, 'for a GPU, as far as the line says'


@needs_training
@pytest.mark.parametrize(('schedule', 'sums'), [('zb-2p', True), ('zb-v', False)])
def test_what_still_waits(ranks, schedule, sums):
    """Steps are validated later: what else makes ranks wait is named, with what to do."""
    more = ['--enable-optimizer-post-validation', '--calculate-per-token-loss']
    code, found = report(ranks, *line(*more, schedule=schedule), training=True)
    notes = found['launch_line']['notes']
    assert code == 0
    assert any('all ranks wait: calculate_per_token_loss=True: ' in note for note in notes)
    assert any('first and last rank sum' in note for note in notes) == sums
    assert any('takes 320 MiB more on each rank' in note for note in notes)
    assert not any('rerun_mode' in note for note in notes), 'they are left out'


def test_another_model_is_trained(ranks):
    """An asynchronous schedule says how old weights are, and how many copies there are."""
    code, found = report(ranks, *line(schedule='pipedream', batch=4))
    (note,) = [each for each in found['launch_line']['notes'] if 'trains another model' in each]
    assert code == 0 and note.startswith('2 microbatches: asynchronous')
    assert 'are 3.5 3 2.5 2 1.5 1 0.5 0 steps old' in note
    assert 'there are 5 4 4 3 3 2 2 1 copies' in note


@pytest.mark.parametrize('size', [8, 1])
def test_nothing_to_do(ranks, size):
    given = [] if size == 8 else ['--pipeline-schedule', 'zb-v']
    words = [*SIZES, '--pipeline-model-parallel-size', size, *given]
    (code, out, _), _ = ranks(2).run(doctor, ['--', *words])
    assert code == 0 and "schedule: Megatron's own" in out
    assert ('one pipeline rank has no pipeline' in out) == (size == 1)


SMALL = '--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --train-iters 4'
SMALL += ' --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8'
SMALL += ' --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1'


LINES = {
    'zbpp doctor, 8 ranks': ['--gpus', '8', '--', *SIZES, '--global-batch-size', '48'],
    'zbpp doctor, 2 ranks': ['--', *SMALL.split()],
}


@pytest.mark.parametrize(
    ('line', 'words', 'said'),
    [(line, *row) for name, line in LINES.items() for row in rows_of('refused_lines.txt', name)],
)
def test_bad_input(ranks, line, words, said):
    assert said in refusal(ranks, *line, *words.split())


def test_the_least_that_a_plan_holds(ranks):
    auto = '--pipeline-schedule auto --pipeline-schedule-memory-limit 1'
    assert report(ranks, '--', *SMALL.split(), *auto.split())[0] == 0


@needs_training
def test_sizes_that_megatron_validates(ranks):
    """Its own words, with the flags; other things that it asserts are noted."""
    lines = {
        '--num-experts 3 --expert-model-parallel-size 2': (2, 'Number of experts should be a mult'),
        '--context-parallel-size 2 --seq-length 62': (2, '--seq-length 62: Megatron refuses it'),
        '--max-position-embeddings 32': (2, '--max-position-embeddings 32: Megatron refuses it'),
        '--num-layers 7': (0, ''),
        '--train-samples 5': (0, 'note: validation by Megatron itself ends here: expected iterat'),
    }
    for words, (wanted, said) in lines.items():
        line = ('--', *SMALL.split(), *words.split())
        (code, out, errors), _ = ranks(2).run(doctor, line, True)
        assert code == wanted and said in out + errors, (words, out, errors)
        assert ('itself' in out) == ('note' in said), out


def test_all_that_is_wrong_is_told_at_once(ranks):
    """Megatron's own flags, one without its value, ours, and one that is misspelt."""
    words = '--hidden-size --num-layers abc --pipeline-clip 3 --pipeline-message-ctas x'
    line = ['--', *SIZES, '--pipeline-schedule', 'zb-v', *words.split(), '--pipeline-traces', 'x']
    (code, out, errors), _ = ranks(2).run(doctor, line)
    assert code == 2 and not out
    assert errors.splitlines() == [
        'zbpp: launch line: argument --hidden-size: expected one argument',
        "zbpp: launch line: argument --num-layers: invalid int value: 'abc'",
        "zbpp: --pipeline-clip is '3': give 'stage' or 'global'",
        "zbpp: --pipeline-message-ctas is 'x': give a whole number from 1 up",
        'zbpp: launch line: --pipeline-traces is not known: did you mean --pipeline-trace-dir?',
    ]


def test_what_slices_refuse(ranks):
    """By name, as a run does; the same line without slices is fine."""
    words = ['--moe-expert-capacity-factor', 2]
    for more, refused in ([], []), (['--pipeline-slices', 4], ['moe_expert_capacity_factor']):
        code, found = report(ranks, *line(*words, *more))
        assert [each['setting'] for each in found['launch_line']['refused']] == refused
        assert code == bool(refused)


@needs_training
def test_by_megatrons_own_parser(ranks):
    words = [*LINE, 'zb-v', '--mtp-num-layers', 1, '--tp-comm-overlap']
    mistaken = ['--mistaken', '--untie-embedding-and-output-weights']
    code, found = report(ranks, '--', *words, *mistaken, training=True)
    line = found['launch_line']
    refused = [each['setting'] for each in line['refused']]
    assert code == 1 and refused == ['tp_comm_overlap', 'mtp_num_layers']
    assert line['layers'] == [1, *[2] * 7, *[1] * 7, 0]
    note, first, scratch = line['notes']
    assert first.startswith('the first iteration is prepared ')
    assert scratch.startswith('losses from scratch ')
    assert note == (
        'no flags of Megatron, unless the script adds them: --mistaken '
        '--untie-embedding-and-output-weights (did you mean --untie-embeddings-and-output-weights?)'
    )


@needs_training
@pytest.mark.on_ranks(2)
def test_no_flag_of_megatron_is_taken_for_a_misspelt_one():
    from megatron_zbpp.launch import flags, launch_line

    ours = argparse.ArgumentParser()
    flags.add_arguments(ours)
    theirs = launch_line._parser('')._option_string_actions.keys()
    launch_line.require_spelt(sorted(theirs - ours._option_string_actions.keys()))


def test_idle_time_is_of_the_layers_as_they_are(ranks):
    """46 layers on 16 ranks of two chunks are not equal stages; counted ends even them out."""
    sizes = '--pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 64'.split()
    found = []
    for more in (['--num-layers', 64], ['--num-layers', 46], ['--num-layers', 62, *ENDS]):
        _, told = report(ranks, '--', *sizes, *map(str, more), '--pipeline-schedule', 'zb-v')
        (iteration,) = told['launch_line']['iterations']
        found.append(iteration['idle_all_ranks'])
    equal, uneven, counted = found
    assert counted == equal and uneven > 1.5 * equal
