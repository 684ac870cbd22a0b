"""What the watchdog looks at, one thing after the other."""

import json
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_zbpp.runtime.guard.culprit import RankStatus, find_culprit
from megatron_zbpp.runtime.guard.watchdog import Watchdog


class Passes:
    """Stands for passes that this rank has ended and others have not."""

    def __init__(self):
        self.over = False

    def ended(self):
        pass

    def beat(self):
        return None if self.over else 'others'

    def lines(self):
        return []


@pytest.fixture
def watchdog(monkeypatch):
    monkeypatch.setattr(Watchdog, '_start', lambda self: None)
    return Watchdog(timeout=60)


def test_passes_that_others_have_not_ended_are_watched_again(watchdog):
    """What is over is not."""
    passes = Passes()
    with watchdog._watching(passes):
        pass
    with watchdog.collective('gradients'):
        assert watchdog._activity.beat() == 'gradients'
    assert watchdog._activity is passes
    passes.over = True
    with watchdog.collective('gradients'):
        pass
    assert watchdog._activity is not passes and watchdog._activity.beat() is None


def test_passes_do_not_give_way_to_older_ones(watchdog):
    older, newer = Passes(), Passes()
    for passes in (older, newer):
        with watchdog._watching(passes):
            pass
    assert watchdog._activity is newer


def test_a_pause_comes_after_all_that_is_over(watchdog):
    passes = Passes()
    with watchdog._watching(passes):
        pass
    assert watchdog._current() is passes
    passes.over = True
    first = watchdog._current()
    assert first is watchdog._pause and first.beat() is not None
    with watchdog.collective('gradients'):
        assert watchdog._current().beat() == 'gradients'
    assert watchdog._current() not in (passes, first), 'its time begins anew'


def test_where_cuda_is_not_used(tmp_path):
    """It makes no context by asking."""
    dist.init_process_group('gloo', f'file://{tmp_path}/met', rank=0, world_size=1)
    with mock.patch.object(torch.cuda, 'set_device', side_effect=AssertionError):
        watchdog = Watchdog(timeout=0.2)
        with watchdog.collective('some barrier'):
            assert watchdog._device is None
            time.sleep(0.1)
        watchdog.stop()
    dist.destroy_process_group()


# ---- Who is blamed, from what ranks say of themselves.


# by rank: what it says; who lives, who asks, for how long nothing has moved there, and who is named
BLAMED = json.loads(Path(__file__).with_name('blamed.json').read_text())


@pytest.mark.parametrize('case', BLAMED)
def test_who_is_blamed(case):
    said, alive, asks, stalled, who, chain = BLAMED[case]
    statuses = {int(rank): RankStatus(*own) for rank, own in said.items()}
    given = {} if stalled is None else {'stalled': stalled}
    assert find_culprit(asks, statuses, {*alive}, **given) == who + chain
    if case == 'a rank that has died, and one that is late':
        assert find_culprit(asks, statuses, {0, 1, 2}).startswith('culprit: none found')


def test_two_at_once_and_one_that_never_spoke():
    said = {0: RankStatus('barrier', (1, 2, 3)), 1: RankStatus('1F0', over=True)}
    said[2] = RankStatus('barrier', (0, 1, 3), ending=True)
    assert find_culprit(0, said, {0}).startswith(
        'culprit: global ranks 1, which has ended its training, and 3, which has never said'
    )
    statement = RankStatus('1F0', (1, 2), 1.5, 'RuntimeError: "x"\n', True)
    assert RankStatus.from_json(statement.to_json()) == statement
