"""NVIDIA's loop ends before its time, by a signal, a duration or an interval: saved and resumed."""

from __future__ import annotations

from typing import Any, NamedTuple

import events
import pytest
from nvidia import needs_training, run, since
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE
from test_launch_post_validation import EARLY

pytestmark = needs_training

FLAGS = [*PIPELINE, *NO_CLIPPING, '--train-iters', 8]
LAST = 4  # iteration before the exit


class Exit(NamedTuple):
    """How a run ends.

    Attributes:
        schedule: of it.
        flags: that ask for it.
        event: that brings it about.
        reported: by that, on each rank.
    """

    schedule: str
    flags: list
    event: Any = events.nothing
    reported: tuple = (None, None)


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


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """What Megatron's own 1F1B gives, and its checkpoint."""
    folder = tmp_path_factory.mktemp('stock')
    trained = run(ranks(2), *FLAGS, '--save', folder, '--save-interval', 1)
    return trained, ['--load', folder, '--ckpt-step', 1]


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
    """It gives what a run without the exit gives."""
    whole, loading = stock
    schedule, flags, event, reported = EXITS[how]
    name, _, early = schedule.partition('+')
    ours = [*FLAGS, '--pipeline-schedule', name, *(EARLY if early else [])]
    saving = ['--save', tmp_path, '--save-interval', 100]
    first = run(ranks(2), *ours, *loading, *saving, *flags, event=event)
    assert first.reported == reported
    assert [*first.losses] == [2, 3, 4]
    assert (tmp_path / 'latest_checkpointed_iteration.txt').read_text() == str(LAST)
    rest = run(ranks(2), *ours, '--load', tmp_path)
    assert first.losses | rest.losses == since(1, whole.losses)
    assert rest.parameters == whole.parameters
    assert rest.optimizer == whole.optimizer
