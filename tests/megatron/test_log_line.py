"""What NVIDIA's training loop logs of the pipeline, and Megatron's own ranges around passes."""

import re
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from unittest import mock

import example
import pytest
import torch
from nvidia import CHECKOUT, Off, needs_training, run

import megatron_zbpp
from megatron_zbpp.analysis import fit_costs
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime.log import job_log

pytestmark = pytest.mark.alone
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
def job_lines(training):
    """What is said once for the job, on the first rank; first the passes that a summary is of."""
    lines, fit = [], fit_costs.measured_costs

    def fitted(timeline):
        lines.append(' '.join(sorted({p.kind for own in timeline.schedule.passes for p in own})))
        return fit(timeline)

    with (
        mock.patch.object(job_log, 'info', lines.append),
        mock.patch.object(fit_costs, 'measured_costs', fitted),
    ):
        yield lines


@contextmanager
def logged(training):
    """What is printed, scalars as TensorBoard and as W&B get them, lines of the job."""
    lines, scalars, kept = [], [], {}
    board, wandb = mock.Mock(), mock.Mock(config={})

    def add_scalar(name, value, iteration):
        scalars.append((iteration, name, float(value)))

    def log(values, iteration):
        kept.update({(iteration, name): value for name, value in values.items()})

    board.add_scalar, wandb.log = add_scalar, log
    with (
        mock.patch.object(training, 'print_rank_last', lambda line: lines.append(line)),
        mock.patch.object(training, 'get_tensorboard_writer', lambda: board),
        mock.patch.object(training, 'get_wandb_writer', lambda: wandb),
        job_lines(training) as said,
    ):
        yield lines, scalars, kept, said


@needs_training
def test_log_line(ranks):
    argv = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 5]
    argv += ['--pipeline-schedule', 'zb-v', '--log-interval', 2, '--tensorboard-log-interval', 4]
    argv += ['--eval-iters', 1, '--eval-interval', 5, '--split', '90,10,0']  # behind the last one
    every = run(ranks(2), *argv, event=logged).reported
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
    argv = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 9]
    argv += ['--pipeline-schedule', 'zb-v', '--clip-grad', 100, '--log-interval', 4]
    argv += ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 3]
    argv += ['--exit-interval', 6, '--tensorboard-log-interval', 2]
    for _, scalars, _, said in run(ranks(2), *argv, event=logged).reported:
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
    argv = ['--train-iters', 6, '--log-interval', 2, '--clip-grad', 100]
    argv += ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 3]
    argv = example.words(data, 'zb-v', *argv)
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
    losses, original = [], training.print_rank_last

    def print_rank_last(line):
        losses.extend(map(float, re.findall(r'lm loss: (\S+)', line)))
        original(line)

    with mock.patch.object(training, 'print_rank_last', print_rank_last):
        yield losses


@needs_training
def test_second_line_after_a_start_is_a_mean(ranks):
    """By Megatron's own loop, which keeps the first iteration's loss: see docs/exactness.md."""
    flags = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 2, '--train-iters', 3]
    stock = run(ranks(2), *flags, event=printed_losses)
    first, second, third = (float.fromhex(loss) for loss, *_ in stock.losses.values())
    assert stock.reported[-1] == pytest.approx([first, (first + second) / 2, third], abs=2e-6)
    assert abs(first - second) > 1e-4
