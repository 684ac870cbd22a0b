"""Every schedule of the library leaves what Megatron's own 1F1B leaves, to the bit; saved by one,
resumed by another as if nothing had happened."""

import shutil
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import example
import pytest
from example import run
from grids import grid, some
from models import Job, assert_same, reference, train
from nvidia import require_same
from outcome import error_of
from rows import row, trains
from supported import TOLERANCE, supports

from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.schedules import FAMILIES, build

MICROBATCHES = (1, 2, 3, 4, 7, 8, 16)
PRECISIONS = ('fp32', 'bf16')
# fewer microbatches than ranks, as many and more, on both numbers of ranks; more yet with `--full`
KEPT = [(1, 2, 'fp32'), (2, 2, 'bf16'), (3, 4, 'bf16'), (4, 4, 'fp32'), (7, 2, 'fp32')]
ITERATIONS = 4
SHORT = 2
CLIPPING, NO_CLIPPING = 0.5, 1e9  # the norm is computed all the same


@supports('GPT, {precision}', '1f1b zb-h1 zb-v')
@some('m, p, precision', KEPT, *product(MICROBATCHES, (2, 4), PRECISIONS))
def test_identical_to_megatron(ranks, data, m, p, precision):
    """Losses, parameters and Adam's state, for every number of microbatches. Tied and untied
    embeddings take turns, the other way round for bf16 as for fp32; even and uneven layers, the
    other way round for p = 4 as for p = 2. So in a full run each number of microbatches is tried
    with each of all these."""
    index = MICROBATCHES.index(m)
    tied = index % 2 == (precision == 'bf16')
    if index % 2 == (p == 4):
        shape = ['--num-layers', 2 * p]
    else:  # does not divide, and a layer fewer beside embedding and loss
        shape = ['--num-layers', 2 * p - 1, '--account-for-embedding-in-pipeline-split']
        shape += ['--account-for-loss-in-pipeline-split']
    shape += [] if tied else ['--untie-embeddings-and-output-weights']
    shape += ['--bf16'] if precision == 'bf16' else []
    common = ['--pipeline-model-parallel-size', p, '--data-path', data, *shape]
    common += ['--global-batch-size', m, '--train-iters', ITERATIONS]

    def trained(schedule, clip):
        options = ['--pipeline-schedule', schedule, '--clip-grad', clip]
        return run(ranks(p), *common, *options)

    clipped = trained('megatron', CLIPPING)
    assert len(set(clipped.losses)) == ITERATIONS and len(clipped.optimizer) > p
    for schedule in ('1f1b', 'zb-h1'):
        assert trained(schedule, CLIPPING) == clipped, schedule
    reference = trained('megatron', NO_CLIPPING)
    assert clipped.parameters != reference.parameters, 'clipping must have been active'
    vee = trained('zb-v', NO_CLIPPING)
    require_same(vee, reference)


@supports('clipping of gradients: the norm is summed in another order', 'zb-v', TOLERANCE)
@pytest.mark.parametrize('p', [2, 4])
def test_clipping_of_another_order(ranks, data, p):
    """ZB-V sums the gradient norm in another order: its clipping differs in the last bits only."""
    common = ['--pipeline-model-parallel-size', p, '--num-layers', 2 * p, '--data-path', data]
    common += ['--global-batch-size', 8, '--train-iters', ITERATIONS, '--clip-grad', CLIPPING]
    reference = run(ranks(p), *common, '--pipeline-schedule', 'megatron')
    vee = run(ranks(p), *common, '--pipeline-schedule', 'zb-v')
    for exact in ('losses', 'grad_norms'):
        values, expected = (list(map(float.fromhex, getattr(r, exact))) for r in (vee, reference))
        assert values == pytest.approx(expected, rel=1e-6), exact


# validation losses agree, and evaluating leaves training alone
test_evaluation = trains(
    'GPT, evaluation',
    {'te': False, 'evaluation': True},
    row('', ('1f1b', 'zb-h1', 'zb-v')),
)


@supports('`defer_embedding_wgrad_compute` in the config of a program', '{schedule}')
@pytest.mark.parametrize('schedule', ['zb-h1', 'zb-v'])
def test_the_embedding_deferred(ranks, data, schedule):
    """As without: the plugin takes it back before the model is built."""
    plain, deferred = (Job(kind, te=False, fused=True) for kind in ('dense', 'embedding deferred'))
    trained = ranks(2).run(train, deferred, deferred.argv(schedule, False, data))
    assert_same(trained, reference(ranks, data, plain))


CHUNKS = {'interleaved': 3, 'zb-interleaved': 3, 'hanayo': 4, 'gis': 3}  # beside the default


def require_stock(ranks, data, p, m, *flags):
    common = ['--pipeline-model-parallel-size', p, '--num-layers', 4 * p, '--data-path', data]
    common += ['--global-batch-size', m, '--train-iters', SHORT, '--clip-grad', NO_CLIPPING]
    trained, expected = (
        run(ranks(p), *common, *more) for more in (flags, ['--pipeline-schedule', 'megatron'])
    )
    require_same(trained, expected)


@supports('GPT, fp32', '{family}')
@grid(family=tuple(family.name for family in FAMILIES), shape=((2, 7), (4, 3), (2, 2), (2, 6)))
def test_every_family(ranks, data, family, shape):
    """With more microbatches than ranks and with fewer; with the usual chunks and with others."""
    for chunks in {None, CHUNKS.get(family)}:
        more = ['--num-virtual-stages-per-pipeline-rank', chunks] if chunks else []
        require_stock(ranks, data, *shape, '--pipeline-schedule', family, *more)


@supports('a schedule from a file, {form}', 'zb-v')
@pytest.mark.parametrize('form', ['json', 'csv'])
def test_from_a_file(ranks, data, tmp_path, form):
    schedule = build('zb-v', 2, 3)
    path = tmp_path / f'schedule.{form}'
    path.write_text(schedule.to_json() if form == 'json' else to_torch_csv(schedule))
    require_stock(ranks, data, 2, 3, '--pipeline-schedule-file', path)


METADATA, TRACKER = 'iter_0000004/.metadata', 'latest_checkpointed_iteration.txt'


@supports('GPT, {precision}, checkpoints go from one schedule to the next', '{first} {second}')
@grid(
    precision=('fp32', 'bf16', 'bf16, distributed optimizer'),
    first=('1f1b', 'zb-v', 'megatron'),
    second=('zb-v', '1f1b', 'zb-v'),
    when=lambda precision, first, second: first != second,
)
def test_resume_with_another_schedule(ranks, data, tmp_path, first, second, precision):
    replicas = 2 if 'distributed' in precision else 1
    pool = ranks(2 * replicas)
    common = ['--pipeline-model-parallel-size', 2, '--num-layers', 5, '--data-path', data]
    common += ['--global-batch-size', 4 * replicas, '--train-iters', 5, '--clip-grad', NO_CLIPPING]
    common += ['--bf16'] if 'bf16' in precision else []
    common += ['--use-distributed-optimizer'] if replicas > 1 else []
    reference = second if replicas > 1 else 'megatron'  # ranks have shards by the schedule
    whole = run(pool, *common, '--pipeline-schedule', reference)
    saving = ['--save', tmp_path / 'checkpoint', '--exit-interval', 3]
    before = run(pool, *common, '--pipeline-schedule', first, *saving)
    loading = ['--load', tmp_path / 'checkpoint']
    after = run(pool, *common, '--pipeline-schedule', second, *loading)
    assert len(before.losses) == 3 and len(after.losses) == 2
    require_same(replace(after, losses=before.losses + after.losses), whole)


def shard(root):
    """The first file of data of the latest checkpoint."""
    return min((root / 'iter_0000004').glob('*.distcp'))


def truncate(root):
    shard(root).write_bytes(shard(root).read_bytes()[:-10])


def remove(*names):
    return lambda root: [(root / name).unlink() for name in names]


def empty(name):
    return lambda root: (root / name).write_bytes(b'')


OTHER = '; give --ckpt-step 2 to go on from iter_0000002, which is whole'
NO_OTHER = '; no other checkpoint in ROOT is whole'
LOST = 'ROOT/iter_0000004 is not whole: it has no '
NO_NUMBER = f"ROOT/{TRACKER} holds '', not an iteration; give --ckpt-step"
# name: what is done to a folder of checkpoints, and how the message begins and ends
DAMAGES = {
    'truncated': (truncate, 'ROOT/iter_0000004/__0_', OTHER),
    'a shard lost': (lambda root: shard(root).unlink(), f'{LOST}__0_', OTHER),
    'metadata lost': (remove(METADATA), f'{LOST}.metadata{OTHER}', ''),
    'metadata empty': (empty(METADATA), f'ROOT/{METADATA} is damaged (', OTHER),
    'tracker empty': (empty(TRACKER), NO_NUMBER, ''),
    'all spoilt': (remove(METADATA, 'iter_0000002/metadata.json'), LOST, NO_OTHER),
}


def check_damages(root):
    """What is said of the folder `root`, for each change alone made to it."""
    import checkpoints

    for name, (change, start, end) in DAMAGES.items():
        copy = root.with_name(name)
        shutil.copytree(root, copy)
        change(copy)
        with pytest.raises(checkpoints.InputError) as error:
            checkpoints.to_load(SimpleNamespace(load=copy, ckpt_step=None))
        said = str(error.value).replace(str(copy), 'ROOT')
        assert said.startswith(start) and said.endswith(end), (name, said)


def test_a_damaged_checkpoint_is_named(ranks, data, tmp_path):
    """And the latest whole one is offered; one bit that differs is found as it is loaded."""
    root = tmp_path / 'checkpoint'
    common = example.words(data, '1f1b', layers=2, m=2)
    run(ranks(2), *common, '--save', root, '--save-interval', 2, '--train-iters', 4)
    ranks(1).run(check_damages, root)
    content = bytearray((damaged := shard(root)).read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    argv = [*common, '--load', str(root)]
    for said in ranks(2).run(error_of, example.train, argv, tmp_path / 'metrics'):
        assert said == f'{damaged} is damaged: not what was saved{OTHER}'
