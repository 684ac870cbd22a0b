"""What NVIDIA's training loop logs of the pipeline, and Megatron's own ranges around passes."""

from __future__ import annotations

import re
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from unittest import mock

import example
import pytest
from nvidia import needs_training, run

from megatron_zbpp.ir import F, Pass

FIGURES = re.compile(
    r'\| pipeline bubble: (\d+\.\d)% \| idle, all ranks: (\d+\.\d)% '
    r'\| live activations: (\d+\.\d) \|$'
)


@contextmanager
def logged(training):
    """(lines as they are printed, scalars as the writer gets them)."""
    lines, scalars = [], []

    def print_rank_last(message):
        lines.append(message)

    class Writer:
        def add_scalar(self, name, value, iteration):
            scalars.append((iteration, name, float(value)))

        def flush(self):
            pass

    with (
        mock.patch.object(training, 'print_rank_last', print_rank_last),
        mock.patch.object(training, 'get_tensorboard_writer', Writer),
    ):
        yield lines, scalars


@needs_training
def test_log_line(ranks):
    argv = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 5]
    argv += ['--pipeline-schedule', 'zb-v', '--log-interval', 2, '--tensorboard-log-interval', 4]
    every = run(ranks(2), *argv, event=logged).reported
    for lines, scalars in every:
        found = {
            int(re.search(r'iteration +(\d+)/', line)[1]): FIGURES.search(line)
            for line in lines
            if ' iteration ' in line and 'loss scale' in line
        }
        assert list(found)[-2:] == [2, 4] and all(found.values()), lines
        assert {match[3] for match in found.values()} == {'2.0'}
        ours = {name: value for i, name, value in scalars if name.startswith('pipeline/')}
        assert {i for i, name, _ in scalars if name.startswith('pipeline/')} == {4}
        assert ours['pipeline/live-activations'] == 2
        assert f'{ours["pipeline/bubble"]:.1%}' == f'{found[4][1]}%'
        assert 0 <= ours['pipeline/bubble'] <= ours['pipeline/idle-all-ranks'] < 1
        assert sum('pipeline bubble' in line for line in lines) == len(found)


def printed(argv, metrics):
    """What the example prints on this rank."""
    with redirect_stdout(StringIO()) as out:
        example.train(argv, metrics)
    return out.getvalue().splitlines()


@pytest.mark.parametrize('schedule', ['zb-v', 'megatron'])
def test_example(ranks, data, tmp_path, schedule):
    """Megatron's own schedule as well, which is only observed."""
    argv = [*example.MODEL, '--num-layers', 4, '--pipeline-model-parallel-size', 2]
    argv += ['--pipeline-schedule', schedule, '--global-batch-size', 4, '--data-path', data]
    argv += ['--train-iters', 5, '--log-interval', 2]
    found = ranks(2).run(printed, list(map(str, argv)), tmp_path / 'metrics.jsonl')[-1]
    lines = [line for line in found if ' iteration ' in line and 'grad norm' in line]
    assert len(lines) == 2
    for line in lines:
        bubble, idle, live = map(float, FIGURES.search(line).groups())
        assert 0 < bubble <= idle < 100 and live == 2


def test_megatrons_ranges():
    """Only where a program asked for them, and not beside torch's."""
    import torch
    from megatron.core import utils

    from megatron_zbpp.mcore.iteration.ranges import profiled

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
