"""What is logged of the pipeline: a banner, lines of the loop, and Megatron's own ranges."""

import re
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace
from unittest import mock

import example
import pytest
import torch
from events import before
from nvidia import CHECKOUT, Off, needs_training, run
from outcome import logged

import megatron_zbpp
from megatron_zbpp import Costs, build
from megatron_zbpp.analysis import fit_costs
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.mcore import training_log
from megatron_zbpp.mcore.layout import StageLayout
from megatron_zbpp.mcore.session import Session
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.mcore.techniques.asynchronous_steps import StageNorms
from megatron_zbpp.runtime.endless import EndlessTraining
from megatron_zbpp.runtime.log import job_log
from megatron_zbpp.techniques.vocabulary.place import with_shards

pytestmark = [pytest.mark.alone, pytest.mark.on_ranks(1)]


def told(schedule, p, m, layout=None):
    """The banner of a schedule, whose model may have a layout."""
    made = build(schedule, p, m)
    plan = None if layout is None else StageLayout(made.placement, layout)
    config = SimpleNamespace(num_layers=8, pipeline_model_parallel_layout=plan)
    return training_log.lines(made, config)


@pytest.mark.parametrize(
    ('schedule', 'p', 'm', 'more'),
    [('interleaved', 2, 5, True), ('interleaved', 2, 6, False), ('1f1b', 2, 5, False)],
)
def test_what_stock_refuses(schedule, p, m, more):
    """Said in one line: Megatron's takes multiples of p only."""
    found = told(schedule, p, m)
    said = [line for line in found if "Megatron's own interleaved schedule refuses them" in line]
    assert len(said) == more
    assert all(line.startswith(f'{m} microbatches are no mult') for line in said)


def test_unequal_layers():
    even = told('zb-v', 2, 4, 'Ett|tt|tt|ttL')
    assert even[2] == told('zb-v', 2, 4)[2]
    uneven = told('zb-v', 2, 4, 'Ett|t|tt|tttL')
    assert 'simulated with F = B = W, by layers: idle GPU time ' in uneven[2]
    assert uneven[2].partition('time')[2] != even[2].partition('time')[2]
    assert 'less time than 1f1b' in even[2]


def test_shards_are_compared_with_the_whole_layer():
    """Both have the output layer; without its times shards had seemed to gain nothing."""
    made = with_shards(build('zb-v', 2, 4))
    _, _, said, _ = training_log.lines(made, SimpleNamespace(num_layers=8))
    assert said.startswith('simulated with F = B = W, shards 0.2: idle GPU time 3.4%, ')
    # 4 microbatches of the last rank, and the first rank's passes before and behind them
    rival, own = 4 * 3 * 1.4 + 3, 14.9
    assert said.endswith(
        f'{1 - own / rival:.1%} less time than 1f1b with the whole output layer on its last rank'
    )


def test_a_plan_is_told_by_its_own_costs():
    """Its second stage takes four times as long."""
    costs = Costs.of([1, 4], [1, 4], [1, 4], activation=[8, 8])
    made = replace(build('zb-h1', 2, 4), costs=costs)
    found = training_log.lines(made, SimpleNamespace(num_layers=8))
    assert 'simulated with the costs of the plan: idle GPU time 38.8%' in found[2]
    assert found[3] == 'simulated memory: 16 in the unit of the plan'


def test_an_asynchronous_schedule_says_that_it_trains_another_model():
    """With the age of weights and the copies by stage, and the microbatches of a call."""
    first, _, late, _ = told('pipedream', 4, 2)
    assert first.endswith('4 ranks x 1 chunks, 2 microbatches')
    assert late.startswith('asynchronous, trains another model than 1F1B: weights of forwards are')
    assert 'are 1.5 1 0.5 0 steps old' in late and 'there are 3 2 2 1 copies' in late
    assert late.endswith('each step makes the weights of the next forward')
    _, _, late, _ = told('pipedream-2bw', 4, 4)
    assert late.endswith('norm and success in the log are of the step before')


def test_whose_norm_clips_is_told():
    with logged('megatron_zbpp.job', 'clipped') as said:
        for refused in ([], ['embeddings are tied']):
            StageNorms(Session(Settings('paci')), EndlessTraining()).decide(refused)
    own, of_all = (line for line, _ in said)
    assert own.startswith('gradients are clipped by the norm of their own stage')
    assert '--pipeline-clip global clips by that of all' in own
    assert of_all.endswith('for which each step waits: embeddings are tied')


FIGURES = re.compile(
    r'\| idle GPU time: (\d+\.\d)% \| pipeline bubble: (\d+\.\d)% '
    r'\| live activations: (\d+\.\d) \|$'
)


SUMMARY = re.compile(
    r'training ends: (\d+\.\d)% idle GPU time in the mean of (\d+) iterations; '
    r'simulated with the times of the latest: ([\d.]+) ms, (\d+\.\d)% (less|more) time than 1f1b'
    r'(?:; early steps: (\d+), taken back: (\d+))?$'
)


@contextmanager
def heard(training):
    """What is printed, scalars as TensorBoard and as W&B get them; and what is said once for the
    job, on the first rank: first the passes that a summary is of."""
    printed, scalars, kept, said = [], [], {}, []
    board, wandb = mock.Mock(), mock.Mock(config={})

    def add_scalar(name, value, iteration):
        scalars.append((iteration, name, float(value)))

    def log(values, iteration):
        kept.update({(iteration, name): value for name, value in values.items()})

    def fitted(timeline):
        said.append(' '.join(sorted({p.kind for own in timeline.schedule.passes for p in own})))

    board.add_scalar, wandb.log = add_scalar, log
    with (
        mock.patch.object(training, 'print_rank_last', printed.append),
        mock.patch.object(training, 'get_tensorboard_writer', lambda: board),
        mock.patch.object(training, 'get_wandb_writer', lambda: wandb),
        mock.patch.object(job_log, 'info', said.append),
        before((fit_costs, 'measured_costs', fitted)),
    ):
        yield printed, scalars, kept, said


ZB_V = '--pipeline-model-parallel-size 2 --global-batch-size 6 --pipeline-schedule zb-v'.split()
EARLY = '--enable-optimizer-post-validation --optimizer-post-validation-clean-steps 3'.split()
EARLY += ['--clip-grad', '100']


@needs_training
def test_log_line(ranks):
    argv = [*ZB_V, *'--train-iters 5 --log-interval 2 --tensorboard-log-interval 4'.split()]
    argv += '--eval-iters 1 --eval-interval 5 --split 90,10,0'.split()  # behind the last one
    every = run(ranks(2), *argv, event=heard).reported
    for lines, scalars, kept, said in every:
        (last,) = filter(None, map(SUMMARY.match, said))
        assert last[2] == '5' and 0 < float(last[1]) < 100
        assert said[-2:] == ['B F W', last[0]], 'not of the evaluation'
        found = {
            int(re.search(r'iteration +(\d+)/', line)[1]): FIGURES.search(line)
            for line in lines
            if ' iteration ' in line and 'loss scale' in line
        }
        assert list(found)[-2:] == [2, 4] and all(found.values()), lines
        assert {match[3] for match in found.values()} == {'2.0'}
        ours = {name: value for i, name, value in scalars if name.startswith('pipeline/')}
        assert {i for i, name, _ in scalars if name.startswith('pipeline/')} == {4}
        assert ours['pipeline/live-activations'] == 2 and len(ours) == 3
        assert {(4, name): value for name, value in ours.items()}.items() <= kept.items()
        assert f'{ours["pipeline/idle-all-ranks"]:.1%}' == f'{found[4][1]}%'
        assert f'{ours["pipeline/bubble"]:.1%}' == f'{found[4][2]}%'
        assert 0 <= ours['pipeline/bubble'] <= ours['pipeline/idle-all-ranks'] < 1
        assert sum('pipeline bubble' in line for line in lines) == len(found)


@needs_training
def test_last_line_of_a_job_that_a_limit_ends(ranks):
    """Of all iterations, also those behind the last line of the log; early steps are counted."""
    argv = [*ZB_V, *EARLY, *'--train-iters 9 --log-interval 4 --tensorboard-log-interval 2'.split()]
    argv += ['--exit-interval', 6]
    for _, scalars, _, said in run(ranks(2), *argv, event=heard).reported:
        (found,) = filter(None, map(SUMMARY.match, said))
        assert found[2] == '6' and found.groups()[5:] == ('3', '0')
        steps = {name: value for i, name, value in scalars if i == 4 and 'step' in name}
        assert steps.items() >= {'pipeline/early-steps': 1, 'pipeline/steps-taken-back': 0}.items()


def printed(argv, metrics):
    """What the example prints on this rank, and what it says on stderr."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        example.train(argv, metrics)
    return out.getvalue().splitlines(), errors.getvalue().splitlines()


@pytest.mark.parametrize('schedule', ['zb-v', 'megatron'])
def test_example(ranks, data, tmp_path, schedule):
    """Megatron's own schedule as well, which is only observed."""
    argv = example.words(data, schedule, '--train-iters', 5, '--log-interval', 2)
    found, _ = ranks(2).run(printed, argv, tmp_path / 'metrics.jsonl')[-1]
    lines = [line for line in found if ' iteration ' in line and 'grad norm' in line]
    assert len(lines) == 2
    for line in lines:
        idle, bubble, live = map(float, FIGURES.search(line).groups())
        assert 0 < bubble <= idle < 100 and live == 2
    last = [match for match in map(SUMMARY.match, found) if match]
    assert [match[2] for match in last] == ([] if schedule == 'megatron' else ['5'])


def test_post_validation_tells_what_it_does(ranks, data, tmp_path):
    """When it begins, once, and how many steps of the interval were early and taken back."""
    argv = example.words(data, 'zb-v', *EARLY, '--train-iters', 6, '--log-interval', 2)
    found = ranks(2).run(printed, argv, tmp_path / 'metrics.jsonl')
    lines = [line for line in found[-1][0] if ' iteration ' in line and 'grad norm' in line]
    steps = [re.search(r'\| early steps: (\d/\d), taken back: (\d) \|$', line) for line in lines]
    assert [match.groups() for match in steps] == [('0/2', '0'), ('1/2', '0'), ('2/2', '0')]
    said = [line for _, errors in found for line in errors if 'post-validation' in line]
    assert said == [
        'megatron_zbpp: post-validation begins, after 3 clean optimizer steps: from now on they do '
        'not wait for all ranks'
    ]


def reported(schedule):
    """What Megatron's report says, corrected, and what is said behind it."""
    if CHECKOUT and CHECKOUT not in sys.path:
        sys.path.insert(0, CHECKOUT)
    from megatron.training import theoretical_memory_usage as usage

    args = Off(
        hidden_size=64, ffn_hidden_size=256, num_layers=8, seq_length=32, micro_batch_size=2,
        num_attention_heads=4, num_query_groups=4, kv_channels=16, padded_vocab_size=128,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=4, data_parallel_size=1,
        virtual_pipeline_model_parallel_size=2, sequence_parallel=True, is_hybrid_model=False,
        world_size=4, expert_model_parallel_size=1, expert_tensor_parallel_size=1,
        recompute_granularity='selective', untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    with (
        megatron_zbpp.enable(schedule) as plugin,
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as errors,
    ):
        of_1f1b = usage.compute_activation_memory(
            Off(**{**vars(args), 'virtual_pipeline_model_parallel_size': None}), 8
        )
        plugin.session.latest = object()  # an iteration has run
        _, activation, _ = usage.report_theoretical_memory(args, 8, verbose=True)
    return activation * usage.NUM_BYTES_IN_MEGABYTE / of_1f1b, out.getvalue(), errors.getvalue()


@needs_training
def test_megatrons_memory_report(ranks):
    """ZB-V holds what 1F1B does; V-Half, with its two chunks, less."""
    share, out, errors = ranks(2).run(reported, 'zb-v')[0]
    assert share == 1 and 'in-flight microbatches: 4' in out and not errors
    assert 'interleaved' not in out
    share, out, errors = ranks(2).run(reported, 'v-half')[0]
    assert share == 3 / 4
    assert 'that is of 1F1B; v-half has 3 microbatches in flight: activation=' in errors


def test_megatrons_ranges():
    """Only where a program asked for them, and not beside torch's."""
    from megatron.core import utils

    from megatron_zbpp.mcore.iteration.batch import profiled

    calls = []
    with (
        mock.patch.object(torch.cuda.nvtx, 'range_push', calls.append),
        mock.patch.object(torch.cuda.nvtx, 'range_pop', lambda: calls.append('end')),
    ):
        for enabled in (False, True):
            utils.configure_nvtx_profiling(enabled)
            try:
                with profiled(Pass(F, 3, 1)):
                    pass
                with torch.profiler.profile(), profiled(Pass(F, 2, 0)):
                    pass
            finally:
                utils.configure_nvtx_profiling(False)
    assert calls == ['PP:3F1', 'end']


@contextmanager
def printed_losses(training):
    losses = []

    def note(line):
        losses.extend(map(float, re.findall(r'lm loss: (\S+)', line)))

    with before((training, 'print_rank_last', note)):
        yield losses


@needs_training
def test_second_line_after_a_start_is_a_mean(ranks):
    """By Megatron's own loop, which keeps the first iteration's loss: see docs/exactness.md."""
    flags = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 2, '--train-iters', 3]
    stock = run(ranks(2), *flags, event=printed_losses)
    first, second, third = (float.fromhex(loss) for loss, *_ in stock.losses.values())
    assert stock.reported[-1] == pytest.approx([first, (first + second) / 2, third], abs=2e-6)
    assert abs(first - second) > 1e-4
