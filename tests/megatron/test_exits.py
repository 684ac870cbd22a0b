"""NVIDIA's loop leaves its way: exits, skipped iterations, re-runs; all as by stock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import events
import pytest
from grids import grid
from nvidia import by, needs_training, require_same, run
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE

pytestmark = needs_training


FLAGS = [*PIPELINE, *NO_CLIPPING, '--train-iters', 8]
LAST = 4  # iteration before the exit


class Exit(NamedTuple):
    schedule: str
    flags: list
    event: Any = events.nothing  # brings it about
    reported: tuple = (None, None)  # by the event, on each rank


SIGNAL = ['--exit-signal-handler']
# runs begin behind the first iteration
EXITS = {
    'signal': Exit('zb-v', SIGNAL, events.Signalled(3, 1, False), ([], ['before it'])),
    'signal in a forward that runs ahead': Exit(
        'zb-h1+post-validation', SIGNAL, events.Signalled(3, 0, True), (['in the step'], [])
    ),
    'signal in a forward that runs ahead in a V': Exit(
        'zb-v+post-validation', SIGNAL, events.Signalled(3, 1, True), ([], ['in the step'])
    ),
    'duration': Exit('zb-v+post-validation', ['--exit-duration-in-mins', 40], events.Late(3)),
    'interval': Exit('zb-h1+post-validation', ['--exit-interval', LAST]),
}
FULL = {'signal in a forward that runs ahead in a V', 'interval'}


def saved(ranks, tmp_path_factory, flags):
    """What Megatron's own 1F1B gives, and its checkpoint."""
    folder = tmp_path_factory.mktemp('stock')
    trained = run(ranks(2), *flags, '--save', folder, '--save-interval', 1)
    return trained, ['--load', folder, '--ckpt-step', 1]


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    return saved(ranks, tmp_path_factory, FLAGS)


@pytest.mark.parametrize(
    'how',
    [
        pytest.param(
            how,
            marks=[
                supports(f"NVIDIA's loop: exit by {how.partition(' ')[0]}, resumed", schedule),
                *([pytest.mark.full] if how in FULL else []),
            ],
        )
        for how, (schedule, *_) in EXITS.items()
    ],
)
def test_resumed_after_an_exit(ranks, stock, tmp_path, how):
    whole, loading = stock
    schedule, flags, event, reported = EXITS[how]
    ours = [*FLAGS, *by(schedule)]
    saving = ['--save', tmp_path, '--save-interval', 100]
    first = run(ranks(2), *ours, *loading, *saving, *flags, event=event)
    assert first.reported == reported
    assert [*first.losses] == [2, 3, 4]
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == str(LAST)
    rest = run(ranks(2), *ours, '--load', tmp_path)
    require_same(replace(rest, losses=first.losses | rest.losses), whole, 1)


# early steps need two iterations alike before them
SKIPPED = [*PIPELINE, *NO_CLIPPING, '--train-iters', 8, '--iterations-to-skip', 3, 6, 7]
AGAIN = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4, '--rerun-mode', 'validate_results']
# schedule: pipeline ranks; on 4 a rank in the middle has no data
RANKS = {'zb-h1': 4}


@pytest.fixture(scope='module')
def skipping(ranks, tmp_path_factory):
    trained, loading = saved(ranks, tmp_path_factory, SKIPPED)
    assert len(set(trained.losses.values())) == 5
    return trained, loading


@supports("NVIDIA's loop: skipped iterations")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-h1', 'zb-v+post-validation'))
def test_skipped_as_by_megatron(ranks, skipping, schedule):
    """From a checkpoint of Megatron's own; forwards may have run ahead of what is skipped."""
    expected, loading = skipping
    size = RANKS.get(schedule, 2)
    ours = [*loading, *by(schedule), '--pipeline-model-parallel-size', size]
    require_same(run(ranks(size), *SKIPPED, *ours), expected, 1, optimizer=False)


@supports("NVIDIA's loop: iterations run again", 'zb-h1 zb-v')
def test_run_again_as_by_megatron(ranks, tmp_path):
    """On the same data; steps that are to be validated later wait, since forwards of an iteration
    would have begun before its data and random states were noted."""
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(2), *AGAIN, *saving, event=events.doubted)
    assert len(stock.reported[-1]['RERUNNING_IN_PLACE']) >= 3 * 8
    for schedule in ('zb-h1+post-validation', 'zb-v'):
        ours = ['--load', tmp_path, '--ckpt-step', 1, *by(schedule)]
        waits = '+' in schedule
        found = run(ranks(2), *AGAIN, *ours, event=events.doubted, waits=waits)
        require_same(found, stock, 1, optimizer=False)
        for seen in found.reported:  # from the second iteration on
            first, again = seen.values()
            assert again and again == first[-len(again) :]


@supports("NVIDIA's loop: exit in the middle of a batch, resumed", 'zb-v')
def test_resumed_where_a_batch_was_doubted(ranks, tmp_path):
    """A loss that is doubted twice: state from before that iteration is saved, and the run ends."""
    start, middle = tmp_path / 'start', tmp_path / 'middle'
    stock = run(ranks(2), *AGAIN, '--save', start, '--save-interval', 1)
    ours = [*AGAIN, *by('zb-v'), '--save', middle, '--save-interval', 100]
    loading = ['--load', start, '--ckpt-step', 1]
    first = run(ranks(2), *ours, *loading, event=events.Faulty(3))
    assert first.reported == ([16], [16]) and first.losses.keys() == {2}
    again = ['--load', middle, '--rerun-mode', 'disabled']  # else on another device only
    rest = run(ranks(2), *ours, *again)
    require_same(replace(rest, losses=first.losses | rest.losses), stock, 1)
