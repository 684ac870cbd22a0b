"""Batches that NVIDIA's loop reads outside the schedule, or twice: skipped iterations, re-runs."""

from __future__ import annotations

import events
import pytest
from grids import grid
from nvidia import needs_training, run, since
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE
from test_launch_post_validation import EARLY

pytestmark = needs_training

# early steps need two iterations alike before them
SKIPPED = [*PIPELINE, *NO_CLIPPING, '--train-iters', 8, '--iterations-to-skip', 3, 6, 7]
AGAIN = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4, '--rerun-mode', 'validate_results']
# schedule: pipeline ranks; on 4 a rank in the middle has no data
RANKS = {'zb-h1': 4}


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """What Megatron's own 1F1B gives that skips the same, and its checkpoint."""
    folder = tmp_path_factory.mktemp('stock')
    trained = run(ranks(2), *SKIPPED, '--save', folder, '--save-interval', 1)
    assert len(set(trained.losses.values())) == 5
    return trained, ['--load', folder, '--ckpt-step', 1]


@supports("NVIDIA's loop: skipped iterations")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-h1', 'zb-v+post-validation'))
def test_skipped_as_by_megatron(ranks, stock, schedule):
    """From a checkpoint of Megatron's own; forwards may have run ahead of what is skipped."""
    expected, loading = stock
    name, _, early = schedule.partition('+')
    size = RANKS.get(schedule, 2)
    ours = [*loading, '--pipeline-schedule', name, *(EARLY if early else [])]
    found = run(ranks(size), *SKIPPED, *ours, '--pipeline-model-parallel-size', size)
    assert found.losses == since(1, expected.losses)
    assert found.parameters == expected.parameters


@supports("NVIDIA's loop: iterations run again", 'zb-h1 zb-v')
def test_run_again_as_by_megatron(ranks, tmp_path):
    """On the same data; steps that are to be validated later wait, since forwards of an iteration
    would have begun before its data and random states were noted.
    """
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(2), *AGAIN, *saving, event=events.doubted)
    assert len(stock.reported[-1]['RERUNNING_IN_PLACE']) >= 3 * 8
    loading = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule']
    for schedule, early in (('zb-h1', EARLY), ('zb-v', [])):
        ours = [*loading, schedule, *early]
        found = run(ranks(2), *AGAIN, *ours, event=events.doubted, waits=bool(early))
        assert found.losses == since(1, stock.losses), schedule
        assert found.parameters == stock.parameters, schedule
        for seen in found.reported:  # from the second iteration on
            first, again = seen.values()
            assert again and again == first[-len(again) :]


@supports("NVIDIA's loop: exit in the middle of a batch, resumed", 'zb-v')
def test_resumed_where_a_batch_was_doubted(ranks, tmp_path):
    """A loss that is doubted twice: state from before that iteration is saved, and the run ends."""
    start, middle = tmp_path / 'start', tmp_path / 'middle'
    stock = run(ranks(2), *AGAIN, '--save', start, '--save-interval', 1)
    ours = [*AGAIN, '--pipeline-schedule', 'zb-v', '--save', middle, '--save-interval', 100]
    loading = ['--load', start, '--ckpt-step', 1]
    first = run(ranks(2), *ours, *loading, event=events.Faulty(3))
    assert first.reported == ([16], [16]) and first.losses.keys() == {2}
    again = ['--load', middle, '--rerun-mode', 'disabled']  # else on another device only
    rest = run(ranks(2), *ours, *again)
    assert first.losses | rest.losses == since(1, stock.losses)
    assert rest.parameters == stock.parameters
    assert rest.optimizer == stock.optimizer
