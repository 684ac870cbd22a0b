"""The output layer, and the embedding, on all pipeline ranks in NVIDIA's loop; hybrid models."""

import functools
import re
from itertools import product

import pytest
from grids import some
from nvidia import SCRIPT, _find_megatron, needs_training, require_same, run, since
from ranks import RankError
from supported import TOLERANCE, absent, supports
from test_auto import told
from test_launch import NO_CLIPPING, PIPELINE
from test_sliced_models import UNTIED
from test_todays_models import PATTERNS, SPEC, segments
from test_vocabulary_training import BOTH, HOSTS, OUTPUT

from megatron_zbpp.mcore import compat

pytestmark = needs_training
FLAG = '--pipeline-vocab-parallel'
IN_SLICES = ['--pipeline-slices', 4]


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """`stock(tied, *more)`: losses of Megatron's 1F1B, its flags, a folder of its checkpoints."""

    @functools.cache
    def made(tied=False, *more):
        folder = tmp_path_factory.mktemp('stock')
        flags = [*PIPELINE, *NO_CLIPPING, *([] if tied else UNTIED)]
        flags += ['--global-batch-size', 4, '--train-iters', 3]
        flags += more
        return run(ranks(2), *flags, '--save', folder, '--save-interval', 1), flags, folder

    return made


def tells_rates():
    """Runs on a rank: whether optimizers tell groups by their rates, too, when they load."""
    _find_megatron()
    from megatron.core.optimizer import optimizer

    return 'max_lr' in optimizer.param_group_identifier_keys


DECOUPLED = 'decoupled rates'
OPTIONS = {
    DECOUPLED: ('--decoupled-lr', 5e-4, '--decoupled-min-lr', 1e-4),
    'clipped gradients': ('--clip-grad', 0.1),
    'stages of unlike numbers of layers': ('--num-layers', 6),
}
TIED = f'{BOTH}, tied'
ALL = OUTPUT, BOTH, TIED


def near(found, expected, iteration):
    """Losses and norms after an iteration, as NVIDIA's loop has them."""
    for at, (loss, *rest) in since(iteration, expected.losses).items():
        own, *others = found.losses[at]
        assert float.fromhex(own) == pytest.approx(float.fromhex(loss), rel=1e-6)
        assert others == rest
        norms = (float.fromhex(each.grad_norms[at]) for each in (found, expected))
        assert next(norms) == pytest.approx(next(norms), rel=1e-6)


def go_on(ranks, stock, folder, layers, schedule, *more):
    """Trains from a checkpoint of Megatron's own 1F1B, which then goes on from ours."""
    layers, _, tied = layers.partition(', ')
    expected, flags, begun = stock(bool(tied), *more)
    ours = [*flags, '--pipeline-schedule', schedule, FLAG, layers]
    ours += ['--load', begun, '--ckpt-step', 1]
    found = run(ranks(2), *ours, '--save', folder, '--save-interval', 1)
    near(found, expected, 1)
    near(run(ranks(2), *flags, '--load', folder, '--ckpt-step', 2), expected, 2)


@supports(
    "NVIDIA's loop: {layers} on all ranks, from and to checkpoints of stock", outcome=TOLERANCE
)
@some(
    'layers, schedule',
    [(OUTPUT, 'zb-v'), (TIED, 'zb-v')],
    *product(ALL, HOSTS),
    (OUTPUT, 'slimpipe'),
)
def test_nvidias_loop(ranks, stock, tmp_path, layers, schedule):
    go_on(ranks, stock, tmp_path, layers, schedule)


@pytest.mark.full
@supports(
    "NVIDIA's loop: {layers} on all ranks, {option}, from and to checkpoints of stock",
    outcome=TOLERANCE,
)
@pytest.mark.parametrize(
    ('layers', 'schedule', 'option'),
    [
        *((OUTPUT, schedule, DECOUPLED) for schedule in ('1f1b', 'zb-h1')),
        (BOTH, 'zb-v', DECOUPLED),
        (TIED, '1f1b', DECOUPLED),
        *((layers, 'zb-v', option) for option in [*OPTIONS][1:] for layers in (OUTPUT, TIED)),
    ],
)
def test_nvidias_loop_with(ranks, stock, tmp_path, layers, schedule, option):
    if option == DECOUPLED and not ranks(1).run(tells_rates)[0]:
        absent('until 0.18 Megatron cannot go on from its own checkpoint with decoupled rates')
    go_on(ranks, stock, tmp_path, layers, schedule, *OPTIONS[option])


@some(
    'layers, schedule, sliced',
    [(OUTPUT, 'zb-v', []), (BOTH, '1f1b', IN_SLICES)],
    *((OUTPUT, '1f1b', sliced) for sliced in ([], IN_SLICES)),
    *((BOTH, 'zb-v', sliced) for sliced in ([], IN_SLICES)),
)
def test_forwards_that_run_again(ranks, layers, schedule, sliced):
    """To the bit as with activations kept: losses are scaled, in a forward that saves nothing."""
    flags = [*PIPELINE, *NO_CLIPPING, *UNTIED, '--global-batch-size', 4, '--train-iters', 2]
    flags += ['--pipeline-schedule', schedule, FLAG, layers, *sliced]
    assert run(ranks(2), *flags, '--pipeline-recompute', 'all') == run(ranks(2), *flags)


@supports("NVIDIA's loop: {layers} on all ranks, from scratch", outcome=TOLERANCE)
@some('layers, schedule', [(OUTPUT, 'zb-v')], *product(ALL, ('1f1b', 'zb-v')))
def test_from_scratch(ranks, stock, layers, schedule):
    """Weights begin as stock draws them."""
    layers, _, tied = layers.partition(', ')
    expected, flags, _ = stock(bool(tied))
    near(run(ranks(2), *flags, '--pipeline-schedule', schedule, FLAG, layers), expected, 0)


@pytest.mark.full
def test_words_that_ranks_do_not_divide(ranks):
    """They are refused; with the flag that the message names they train."""
    flags = [*PIPELINE, '--pipeline-model-parallel-size', 3, '--num-layers', 3, *UNTIED]
    flags += ['--train-iters', 2, '--pipeline-schedule', '1f1b', FLAG, OUTPUT]
    with pytest.raises(RankError, match='256 words does not divide among 3 ranks: give') as error:
        run(ranks(3), *flags)
    (cure,) = set(re.findall(r'give (--make-vocab-size-divisible-by \d+)', str(error.value)))
    assert len(run(ranks(3), *flags, *cure.split()).losses) == 2


@supports("NVIDIA's loop: measures, plans and switches: {layers} on all ranks", 'auto')
@some('layers', [OUTPUT], BOTH)
def test_auto(ranks, layers):
    """It switches for sure, and goes on to the bit of 1F1B with the same layers on all ranks."""
    flags = [*PIPELINE, *NO_CLIPPING, *UNTIED, '--global-batch-size', 4, '--train-iters', 13]
    flags += [FLAG, layers]
    plain = run(ranks(2), *flags, '--pipeline-schedule', '1f1b')
    auto = ['--pipeline-schedule', 'auto', '--pipeline-schedule-profile-iters', 3]
    switching = functools.partial(told, switching=True, seconds=2.0)
    ours = run(ranks(2), *flags, *auto, event=switching)
    assert len(ours.losses) == 13 and ours.losses == plain.losses
    assert ours.parameters == plain.parameters
    planned, compared, partition = ours.reported[0]
    assert 'switches' in planned and 'whole output layer on its last rank' in planned
    assert 'ms with the planned schedule' in compared and 'output layer on all ranks' in partition


FP32 = ['--transformer-impl', 'transformer_engine', '--position-embedding-type', 'rope']
HYBRID = SCRIPT.with_name('pretrain_hybrid.py')  # in a checkout


@pytest.fixture(scope='module')
def trained(te_ranks, tmp_path_factory):
    """`trained(case, tied, schedule, layers)`: stock's three iterations, or two from the first."""
    if te_ranks(2).run(compat.hybrid_model)[0] is None:
        absent('from 0.18 on')

    def hybrid(*flags):
        return run(te_ranks(2), *flags, script=HYBRID if HYBRID.exists() else SCRIPT)

    def of_case(case, tied):
        pattern, *more = PATTERNS[case]
        flags = [*FP32, *NO_CLIPPING, *more, '--global-batch-size', 4, '--train-iters', 3]
        flags += ['--num-layers', 8, '--pipeline-model-parallel-size', 2]
        flags += [] if tied else UNTIED
        return [*SPEC, *flags, '--hybrid-layer-pattern'], pattern

    @functools.cache
    def stock(case, tied):
        folder = tmp_path_factory.mktemp('stock')
        flags, pattern = of_case(case, tied)
        return hybrid(*flags, segments(pattern, 2), '--save', folder, '--save-interval', 1), folder

    @functools.cache
    def made(case, tied, schedule=None, layers=OUTPUT):
        expected, folder = stock(case, tied)
        if schedule is None:
            return expected
        flags, pattern = of_case(case, tied)
        asked = ['--pipeline-schedule', schedule, FLAG, layers]
        return hybrid(*flags, pattern, *asked, '--load', folder, '--ckpt-step', 1)

    return made


@supports("NVIDIA's loop: {layers} on all ranks, hybrid model, {case}", outcome=TOLERANCE)
@some(
    'layers, schedule, case',
    [(OUTPUT, 'zb-v', 'experts'), (TIED, 'zb-v', 'attention and MLP')],
    *product(ALL, ('zb-h1', 'interleaved', 'zb-v'), ('experts', 'attention and MLP')),
)
def test_close_to_stock(trained, layers, schedule, case):
    """From a checkpoint of Megatron's own 1F1B, in fp32; all schedules are alike to the bit."""
    layers, _, tied = layers.partition(', ')
    found = trained(case, bool(tied), schedule, layers)
    near(found, trained(case, bool(tied)), 1)
    assert len(since(1, found.losses)) == 2
    require_same(trained(case, bool(tied), '1f1b', layers), found)
