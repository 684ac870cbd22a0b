"""Multi-token prediction in NVIDIA's training loop: to the bit as by Megatron's own schedule."""

from collections.abc import Callable, Iterator

import events
import pytest
import wheels
from grids import grid
from nvidia import by, go_on, needs_training, run, since
from ranks import Pool, RankError, Ranks
from supported import refuses, supports
from test_same_start import P4, require_same_start
from test_te_launch import TE

pytestmark = needs_training

SEEDS = ['--pipeline-dropout-seeds']
Layers = tuple[Callable[[int], Ranks], list]
MTP = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3""".split()


def can_be_megatrons() -> bool:
    """On each rank: whether such a model is built without Transformer Engine: until 0.19."""
    from megatron.core.transformer import multi_token_prediction

    ask = getattr(multi_token_prediction, 'is_inference_column_parallel_linear', None)
    try:
        return ask is None or not ask(None)
    except TypeError:  # it looks for classes that are derived from Transformer Engine's
        return False


@pytest.fixture(scope='module')
def layers_here(ranks) -> Iterator[Layers]:
    """Ranks, and flags for Megatron's own layers, or else for Transformer Engine's."""
    if ranks(2).run(can_be_megatrons)[0]:
        yield ranks, []
        return
    pool = Pool(wheels.install, wheels.transformer_engine(wheels.NEWEST))
    yield lambda size: Ranks(size, pool), TE
    pool.stop()


@pytest.fixture
def layers(layers_here, record_property) -> Layers:
    """The same, and the record of what this test shows says of which they are."""
    if layers_here[1]:
        record_property('te', wheels.NEWEST)
    return layers_here


@supports('training from scratch, the same start: multi-token prediction', 'zb-v')
@pytest.mark.full
def test_from_scratch(layers):
    """The last rank draws a copy of the embedding before its layers, some of which others hold."""
    ranks, te = layers
    require_same_start(ranks(4), [*MTP, *te, *P4, '--mtp-num-layers', 2])


@supports('multi-token prediction, depth {depth}')
@grid(depth=(1, 2), p=(2, 4), schedule=('zb-h1', 'zb-v', 'dualpipe-v', 'interleaved', 'auto'))
def test_identical_to_megatron(layers, tmp_path, depth, p, schedule):
    """From a checkpoint that Megatron's own 1F1B saved; its layout is that of one chunk a rank."""
    ranks, te = layers
    flags = [*MTP, *te, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--mtp-num-layers', depth]
    _, stock = go_on(ranks(p), tmp_path, flags, by(schedule))
    assert {'mtp', 'embedding'} <= stock.parameters.keys()


@supports('multi-token prediction, depth 2', '{schedule}+post-validation')
@pytest.mark.parametrize('schedule', ['zb-2p', 'zb-v'])
def test_post_validation(layers, tmp_path, schedule):
    """Losses of forwards that ran ahead are logged with their own iteration."""
    ranks, te = layers
    flags = [*MTP, *te, '--pipeline-model-parallel-size', 2, '--num-layers', 4]
    flags += ['--mtp-num-layers', 2, '--train-iters', 5]
    ours, stock = go_on(
        *(ranks(2), tmp_path, flags, by(f'{schedule}+post-validation')),
        event=events.mtp_losses,
        stock_event=events.mtp_losses,
    )
    assert ours.reported[-1] == stock.reported[-1][1:]
    assert len({tuple(losses) for losses in stock.reported[-1]}) == 5, 'of the rank that has them'


@supports(
    'dropout seeded as in our 1f1b with `--pipeline-dropout-seeds`: multi-token prediction', 'zb-v'
)
def test_dropout_seeds(layers):
    """From scratch; its layers have masks of their own, and those of its embedding go with them."""
    ranks, te = layers
    flags = [*MTP, *te, '--pipeline-model-parallel-size', 2, '--num-layers', 4]
    flags += ['--mtp-num-layers', 2, '--hidden-dropout', 0.1, '--attention-dropout', 0.1]
    plain, seeded, ours = (
        run(ranks(2), *flags, *by(name), *more)
        for name, more in (('1f1b', []), ('1f1b', SEEDS), ('zb-v', SEEDS))
    )
    assert ours.losses == seeded.losses != plain.losses and len(ours.losses) == 3
    assert ours.parameters == seeded.parameters


@supports('multi-token prediction in a stage of its own, depth {depth}', 'zb-h1')
@pytest.mark.parametrize('depth', [1, 2])
def test_a_stage_of_its_own(layers, tmp_path, depth):
    """Its message to the stage of the loss is longer than all others; it resumes as stock does."""
    ranks, te = layers
    layout = ['--pipeline-model-parallel-layout', f'Etttt|tttt|{"m" * depth}|L', '--num-layers', 8]
    flags = [*MTP, *te, *layout, '--pipeline-model-parallel-size', 4]
    flags += ['--mtp-num-layers', depth]
    saving = ['--save', tmp_path, '--save-interval', 1]
    stock = run(ranks(4), *flags, *saving)
    assert len(set(stock.losses.values())) == 3
    assert run(ranks(4), *flags, *by('zb-h1')) == stock
    loading = ['--load', tmp_path, '--ckpt-step', 1]
    again = run(ranks(4), *flags, *loading)
    assert run(ranks(4), *flags, *by('zb-h1'), *loading) == again
    # Megatron's own: copies of the embedding part after a resume (docs/limits.md)
    assert again.losses != since(1, stock.losses) and again.losses[2] == stock.losses[2]


@refuses(
    'multi-token prediction in a stage of its own',
    'it must come before the stage of the loss',
    'zb-v',
)
def test_a_stage_of_its_own_needs_a_loop(layers):
    ranks, te = layers
    layout = ['--pipeline-model-parallel-layout', 'Ett|tt|m|L', '--num-layers', 4]
    flags = [*MTP, *te, *layout, '--pipeline-model-parallel-size', 2, '--mtp-num-layers', 1]
    with pytest.raises(RankError, match='before the stage of the loss'):
        run(ranks(2), *flags, *by('zb-v'))
