"""Checkpoints of the format `torch`: kept by rank and chunk, for the placement that saved them."""

import functools
import importlib.util
import shutil

import events
import pytest
from grids import some
from nvidia import COMMON, EARLY, SCRIPT, forget, needs_training, require_same, run, train
from supported import refuses, supports
from test_launch import DISTRIBUTED, NO_CLIPPING, PIPELINE

pytestmark = needs_training

FORMAT = ['--ckpt-format', 'torch']
FLAGS = [*PIPELINE, *NO_CLIPPING, '--train-iters', 4]
CHUNKS = ['--num-virtual-stages-per-pipeline-rank', 2]
OURS = '--pipeline-schedule'
STOCK_1F1B, STOCK_INTERLEAVED = "Megatron's 1F1B", "Megatron's interleaved schedule"
RUNS = {
    STOCK_1F1B: [],
    'zb-h1': [OURS, 'zb-h1'],
    STOCK_INTERLEAVED: CHUNKS,
    'interleaved': [OURS, 'interleaved', *CHUNKS],
    'zb-v': [OURS, 'zb-v'],
    'v-half': [OURS, 'v-half'],
    'zb-1p': [OURS, 'zb-1p', '--pipeline-model-parallel-layout', 'Ettt|tL'],
}
# saved by, loaded by, what the first rank has by each
UNLIKE = (
    (STOCK_INTERLEAVED, 'zb-v', ('E 1 | 3', '2 | 3')),
    ('zb-v', 'interleaved', ('2 | 3', 'E 1 | 3')),
    (STOCK_1F1B, 'zb-v', ('E 1-2', '2 | 3')),
    ('zb-v', 'zb-h1', ('2 | 3', 'E 1-2')),  # as in the test of the cure
    (STOCK_1F1B, 'interleaved', ('E 1-2', 'E 1 | 3')),
    ('zb-h1', 'zb-1p', ('E 1-2', 'E 1-3')),
)
LIKE = (STOCK_1F1B, 'zb-h1'), ('zb-v', 'v-half')
LIKE_STOCK = ('zb-h1', STOCK_1F1B), ('interleaved', STOCK_INTERLEAVED)


def event_of(name):
    return events.aliased_sends if name == STOCK_INTERLEAVED else events.nothing


@pytest.fixture(scope='module')
def saved(ranks, tmp_path_factory):
    """By who saves: how to go on from a checkpoint after two iterations, and what then comes."""

    @functools.cache
    def trained(name):
        folder = tmp_path_factory.mktemp('saved')
        saving = [*FORMAT, '--save', folder, '--save-interval', 2]
        whole = run(ranks(2), *FLAGS, *saving, *RUNS[name], event=event_of(name))
        return [*FLAGS, *FORMAT, '--load', folder, '--ckpt-step', 2], whole

    return trained


def refusal(argv, event):
    """On each rank: what is said instead of training, and as what."""
    try:
        train(argv, event)
    except (ValueError, AssertionError) as error:
        return type(error), str(error)
    finally:
        forget()
    return None


def refused(ranks, *argv, event=events.nothing):
    """What all ranks say alike instead of training, and as what."""
    found = ranks.run(refusal, [*COMMON, *map(str, argv)], event)
    assert found[0] is not None and set(found) == {found[0]}
    return found[0]


@refuses(
    'checkpoint of the format torch, of another placement', 'it is kept by rank and chunk', 'zb-v'
)
@some('saver, loader, held', UNLIKE[:1], *UNLIKE)
def test_another_placement_is_refused(ranks, saved, saver, loader, held):
    loading, _ = saved(saver)
    kind, text = refused(ranks(2), *loading, *RUNS[loader])
    assert kind is ValueError
    layers = f'rank 0 holds layers {held[0]} by {saver}, but {held[1]} by {loader}'
    assert 'iter_0000002 cannot be loaded: ' in text and layers in text


@some('loader', [STOCK_1F1B], STOCK_INTERLEAVED)
def test_megatron_refuses_a_v(ranks, saved, loader):
    """Without us, too: it compares what a V's files say of the pipeline."""
    loading, _ = saved('zb-v')
    kind, text = refused(ranks(2), *loading, *RUNS[loader], event=event_of(loader))
    assert kind is AssertionError
    assert 'as zb-v of megatron_zbpp places them, which alone can load it' in text


@supports("NVIDIA's loop: checkpoints of the format torch, to a like placement", '{loader}')
@some('saver, loader', [(STOCK_INTERLEAVED, 'interleaved')], *LIKE)
def test_like_placements_exchange(ranks, saved, saver, loader):
    resumes(ranks, saved, saver, loader)


@some('saver, loader', [], *LIKE_STOCK)
def test_megatron_loads_a_loop(ranks, saved, saver, loader):
    resumes(ranks, saved, saver, loader)


def resumes(ranks, saved, saver, loader):
    loading, whole = saved(saver)
    ours = run(ranks(2), *loading, *RUNS[loader], event=event_of(loader))
    require_same(ours, whole, 2)
    assert len(ours.losses) == 2


def convert(argv):
    """On each rank: the script, which ends before it trains."""
    import megatron_zbpp.launch

    try:
        megatron_zbpp.launch.main(['--cpu', str(SCRIPT), *argv])
    except SystemExit as left:
        assert not left.code, left.code
    finally:
        forget()


def test_the_cure(ranks, saved, tmp_path):
    """Converted by the schedule that saved it, another one goes on from it."""
    loading, whole = saved('zb-v')
    cure = ['--ckpt-convert-format', 'torch_dist', '--ckpt-convert-save', tmp_path]
    _, text = refused(ranks(2), *loading, *RUNS['zb-h1'])
    assert f'{cure[0]} {cure[1]} {cure[2]} FOLDER' in text
    ranks(2).run(convert, [*COMMON, *map(str, [*loading, *RUNS['zb-v'], *cure])])
    ours = run(ranks(2), *FLAGS, '--load', tmp_path / 'torch_dist', *RUNS['zb-h1'])
    require_same(ours, whole, 2, optimizer=False)
    assert len(ours.losses) == 2


@refuses(
    "checkpoint of another placement, with the distributed optimizer's state",
    'that is kept by rank, unless it is fully reshardable',
    'zb-v',
)
def test_the_distributed_optimizers_state_is_refused(ranks, tmp_path):
    """In the format torch_dist, too; its weights go to any schedule."""
    flags = [*FLAGS, *DISTRIBUTED, '--save', tmp_path, '--save-interval', 2]
    run(ranks(2), *flags, '--exit-interval', 2, *CHUNKS, event=events.aliased_sends)
    loading = [*FLAGS, *DISTRIBUTED, '--load', tmp_path, *RUNS['zb-v']]
    kind, text = refused(ranks(2), *loading)
    assert kind is ValueError
    assert "the distributed optimizer's state in this checkpoint is kept by rank" in text
    assert f'rank 0 holds layers E 1 | 3 by {STOCK_INTERLEAVED}, but 2 | 3 by zb-v' in text
    assert len(run(ranks(2), *loading, '--no-load-optim').losses) == 2


@pytest.mark.full
@supports("NVIDIA's loop: random states in checkpoints", '{schedule} {schedule}+post-validation')
@pytest.mark.parametrize(
    ('format', 'schedule', 'reference'),
    [('torch_dist', 'zb-v', 'zb-v'), ('torch', 'zb-h1', STOCK_1F1B)],
)
def test_random_states_go_on(ranks, tmp_path, format, schedule, reference):
    """Saved where forwards of the next iteration have run, too: those of this one. On a CPU
    Megatron's loaders draw from the generator of dropout when they start: two runs that go on are
    compared."""
    flags = [*FLAGS, '--ckpt-format', format, '--hidden-dropout', 0.1, '--train-iters', 6]
    with_states = functools.partial(run, ranks(2), without=('--no-save-rng', '--no-load-rng'))
    found = []
    for name, early in ((reference, []), (schedule, EARLY)):
        folder = tmp_path / str(len(found))
        saving = ['--save', folder, '--save-interval', 4, *RUNS[name], *early]
        whole = with_states(*flags, *saving)
        after = with_states(*flags, '--load', folder, '--ckpt-step', 4, *RUNS[name])
        found.append((whole.losses, after.losses))
    assert found[0] == found[1] and len(found[0][1]) == 2


@pytest.mark.full
def test_random_states_of_another_placement(ranks, tmp_path):
    """In the format torch_dist each rank goes on with those of the rank of its number."""
    flags = [*FLAGS, '--hidden-dropout', 0.1]
    with_states = functools.partial(run, ranks(2), without=('--no-save-rng', '--no-load-rng'))
    with_states(*flags, '--save', tmp_path, '--save-interval', 2, '--exit-interval', 2)
    assert len(with_states(*flags, '--load', tmp_path, *RUNS['zb-v']).losses) == 2


@pytest.mark.skipif(
    importlib.util.find_spec('nvidia_resiliency_ext') is None,
    reason='local checkpoints need nvidia-resiliency-ext: 0.5 or later, of glibc 2.39 (elsewhere '
    'its wheel unpacked on PYTHONPATH)',
)
@supports("NVIDIA's loop: local checkpoints", 'zb-v')
@refuses('local checkpoint, of another placement', 'it is kept by rank and chunk', 'zb-h1')
def test_local_checkpoints_are_for_the_placement_that_saved(ranks, tmp_path):
    flags = [
        *FLAGS,
        *('--non-persistent-ckpt-type', 'local', '--non-persistent-save-interval', 3),
        *('--non-persistent-local-ckpt-dir', tmp_path / 'local'),
        *('--save', tmp_path / 'global', '--load', tmp_path / 'global', '--save-interval', 100),
    ]
    whole = run(ranks(2), *flags, *RUNS['zb-v'])
    shutil.rmtree(tmp_path / 'global')  # which has the end of training
    kind, text = refused(ranks(2), *flags, *RUNS['zb-h1'])
    assert kind is ValueError
    assert text.startswith(f'{tmp_path / "local"} cannot be loaded: a local checkpoint is kept by')
    assert 'rank 0 holds layers 2 | 3 by zb-v, but E 1-2 by zb-h1' in text
    assert 'load a checkpoint that is not local' in text
    require_same(run(ranks(2), *flags, *RUNS['zb-v']), whole, 3, optimizer=False)
