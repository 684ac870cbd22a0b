"""What the watchdog looks at, one thing after the other."""

import time
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


@pytest.mark.parametrize('over', [False, True])
def test_passes_that_others_have_not_ended_are_watched_again(watchdog, over):
    passes = Passes()
    with watchdog._watching(passes):
        passes.over = over
    with watchdog.collective('gradients'):
        assert watchdog._activity.beat() == 'gradients'
    assert (watchdog._activity is passes) == (not over)
    assert not over or watchdog._activity.beat() is None


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
BLAMED = [
    # rank 3 waits for 2, which waits for 1, which waits for 0, which is stopped
    (
        {0: ('1F4', (1,), 0.5), 1: ('F', (0,), 6.0), 2: ('F', (1,), 6.0), 3: ('F', (2,), 6.0)},
        *({1, 2, 3}, 3, 6.0, 'culprit: global rank 0, which does not answer'),
        ' (its last word: 1F4); 1 waits for 0, 2 waits for 1, 3 waits for 2',
    ),
    # who stands and waits for nobody
    (
        {0: ('0B0', (1,), 6.0), 1: ('save', (), 5.5)},
        *({0, 1, 2, 3}, 0, 6.0, 'culprit: global rank 1, which stands for 6 s at save; '),
        '0 waits for 1',
    ),
    # where a rank has died, others that live and have not come yet are not late
    (
        {0: ('step', (1, 2)), 1: ('1F0', (), 9.0), 2: ('step', (0, 1))},
        *({0, 1}, 0, None, 'culprit: global rank 2, which does not answer (its last word: step); '),
        '0 waits for 2',
    ),
    # who ends because of others is no culprit, though it no longer answers
    (
        {
            0: ('0B0', (1,)),
            1: ('1B0', (2,), 0.0, '', True),
            2: ('2F4', (), 0.0, 'RuntimeError: out of luck', True),
        },
        *({0}, 0, None, 'culprit: global rank 2, which failed at 2F4: RuntimeError: out of luck; '),
        '0 waits for 1, 1 waits for 2',
    ),
]


@pytest.mark.parametrize(('said', 'alive', 'asks', 'stalled', 'who', 'chain'), BLAMED)
def test_who_is_blamed(said, alive, asks, stalled, who, chain):
    statuses = {rank: RankStatus(*own) for rank, own in said.items()}
    given = {} if stalled is None else {'stalled': stalled}
    assert find_culprit(asks, statuses, alive, **given) == who + chain
    if 9.0 in said[1]:
        assert find_culprit(asks, statuses, {0, 1, 2}).startswith('culprit: none found')


def test_two_at_once_and_one_that_never_spoke():
    said = {0: RankStatus('barrier', (1, 2, 3)), 1: RankStatus('1F0', over=True)}
    said[2] = RankStatus('barrier', (0, 1, 3), ending=True)
    assert find_culprit(0, said, {0}).startswith(
        'culprit: global ranks 1, which has ended its training, and 3, which has never said'
    )
    statement = RankStatus('1F0', (1, 2), 1.5, 'RuntimeError: "x"\n', True)
    assert RankStatus.from_json(statement.to_json()) == statement
