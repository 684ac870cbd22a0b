"""Megatron-Bridge: recipes train by our schedules as by Megatron, and load what it saved."""

import functools
import re
from types import SimpleNamespace

import bridge
import pytest
import recipe
import wheels
from gpu import CUDA
from grids import some
from ranks import Pool, Ranks
from recipe import ITERATIONS, LORA, MTP, PACKED, SCRATCH, TIED, UNTIED, train
from stock import trained as trained_by_stock
from supported import refuses, supports

from megatron_zbpp.schedules import build

pytestmark = [pytest.mark.te, pytest.mark.skipif(CUDA, reason='tested on the CPU')]


WHAT = f'Megatron-Bridge {bridge.VERSION}: '


@pytest.fixture(scope='module')
def bridge_ranks():
    """As `ranks`, in processes that have Bridge, and Transformer Engine with emulated kernels."""
    newest = wheels.transformer_engine(wheels.NEWEST)
    pool = Pool(bridge.install, bridge.folder(), newest)
    yield lambda size: Ranks(size, pool)
    pool.stop()


@pytest.fixture(scope='module')
def stock(bridge_ranks, tmp_path_factory):
    """Weights of Hugging Face's, and what Megatron's own schedule makes of them."""

    @functools.cache
    def trained(kind):
        folder = tmp_path_factory.mktemp('weights')
        bridge_ranks(2).run(recipe.save_weights, folder, kind, timeout=240)
        job = (train, folder, 'megatron', False, kind)
        found = trained_by_stock(bridge_ranks(2), *job, data=folder, timeout=240)
        assert len(set(found[-1].losses)) >= ITERATIONS
        assert found[0].loaded == found[1].loaded and found[0].weights == found[1].weights
        kept = {name for name, _ in found[0].loaded.items() & found[0].weights.items()}
        assert kept == {name for name in found[0].loaded if kind == LORA and '_proj' not in name}
        assert any(name.startswith('mtp.') for name in found[0].loaded) == (kind == MTP)
        return folder, found

    return trained


KEPT = [(UNTIED, 'zb-v+post-validation'), *((kind, 'zb-v') for kind in (TIED, LORA, MTP, PACKED))]
OTHERS = ('zb-h1', 'zb-2p+post-validation')


@supports(WHAT + '{kind}, weights from and to Hugging Face', '{schedule}')
@some(
    'kind, schedule', KEPT, *((kind, name) for name in OTHERS for kind in (UNTIED, TIED, LORA, MTP))
)
def test_identical_to_megatron(bridge_ranks, stock, kind, schedule, record_property):
    """With the embedding tied to the output layer, and not."""
    record_property('te', wheels.NEWEST)
    folder, expected = stock(kind)
    name, _, early = schedule.partition('+')
    trained = bridge_ranks(2).run(train, folder, name, 1 if early else False, kind, timeout=240)
    for ours, theirs in zip(trained, expected, strict=True):
        assert ours.loaded == theirs.loaded, 'what was read'
        assert ours.losses == theirs.losses
        assert ours.weights == theirs.weights, 'what was written'
        if name != 'zb-v':  # which sums the norm in another order
            assert ours.norms == theirs.norms
    assert any(ours.early for ours in trained) == bool(early)
    # the last iteration begins while the step before it is on trial; but two ranks that have an
    # embedding each add up its gradients
    assert all(theirs.waits[-1] for theirs in expected)
    waiting = not early or (kind in (TIED, MTP) and name != 'zb-v')
    assert all(bool(ours.waits[-1]) == waiting for ours in trained)


@supports(WHAT + 'training from scratch, the same start', 'zb-v')
@pytest.mark.full
def test_from_scratch(bridge_ranks, tmp_path):
    """Weights that Megatron draws, and losses, are those of stock Megatron."""
    bridge_ranks(2).run(recipe.save_weights, tmp_path, UNTIED, timeout=240)
    stock, ours = (
        bridge_ranks(2).run(train, tmp_path, schedule, False, SCRATCH, timeout=240)[-1]
        for schedule in ('megatron', 'zb-v')
    )
    assert ours.loaded == stock.loaded and len(stock.loaded) > 4
    assert ours.losses == stock.losses and ours.weights == stock.weights


DROPOUT = {'model.hidden_dropout': 0.1, 'model.attention_dropout': 0.1}


@supports(WHAT + 'dropout seeded as in our 1f1b with `dropout_seeds`: {kind}', 'zb-v')
@some('kind', [UNTIED], MTP)
def test_dropout_seeds(bridge_ranks, stock, kind, record_property):
    """All placements draw the same masks; the layers of LoRA's model are wrapped."""
    record_property('te', wheels.NEWEST)
    folder, without = stock(kind)
    seeded, ours = (
        bridge_ranks(2).run(
            functools.partial(train, dropout_seeds=True),
            *(folder, name, False, kind, DROPOUT),
            timeout=240,
        )[-1]
        for name in ('1f1b', 'zb-v')
    )
    assert ours.losses == seeded.losses != without[-1].losses
    assert ours.weights == seeded.weights


def enabling(folder, changes, schedule='zb-v'):
    """Runs on a rank: what the configuration has become, or why it cannot."""
    from megatron_zbpp import bridge as ours
    from megatron_zbpp.mcore import enabled

    made, _ = recipe.config(folder)
    recipe.change(made, changes)
    try:
        ours.enable(made, schedule)
        model = made.model
        if made.comm_overlap is not None:
            made.comm_overlap.finalize()
            made.comm_overlap.setup(model, made.optimizer, made.ddp)
            assert not model.defer_embedding_wgrad_compute and not model.delay_wgrad_compute
        return model.pipeline_model_parallel_layout, model.virtual_pipeline_model_parallel_size
    except (ValueError, NotImplementedError) as error:
        return str(error)
    finally:
        if enabled.plugin is not None:
            enabled.plugin.disable()
            enabled.plugin = None


EXPERTS = {
    'model.num_moe_experts': 2,
    'model.expert_model_parallel_size': 2,
    'model.moe_token_dispatcher_type': 'alltoall',
    'model.bf16': True,
}
OVERLAPPED = {'overlap_moe_expert_parallel_comm': True, 'delay_wgrad_compute': True}
TENSOR = {'model.tensor_model_parallel_size': 2, 'model.sequence_parallel': True}
TENSOR |= {'comm_overlap': {'tp_comm_overlap': True}}
OWN_PG, LAYOUT = 'dist.use_decentralized_pg', 'model.pipeline_model_parallel_layout'
REPLICA = 'a chunk may read the data of another replica'


@pytest.mark.parametrize(
    ('schedule', 'changes', 'expected'),
    [
        ('zb-v', {}, ('Et|t|t|tL', 2)),
        ('zb-h1', {}, (None, None)),
        ('zb-interleaved', {'model.virtual_pipeline_model_parallel_size': 2}, ('Et|t|t|tL', 2)),
        ('zb-v', {'model.account_for_loss_in_pipeline_split': True}, ('Et|tt|t|L', 2)),
        ('zb-h1', {'model.num_layers': 5}, ('Ettt|ttL', None)),
        ('zb-v', {'model.defer_embedding_wgrad_compute': True}, ('Et|t|t|tL', 2)),
        ('zb-v', {'comm_overlap': {'defer_embedding_wgrad_compute': True}}, ('Et|t|t|tL', 2)),
        ('zb-v', {'comm_overlap': {'tp_comm_overlap': True}}, ('Et|t|t|tL', 2)),
        ('dualpipe-v', {**EXPERTS, 'comm_overlap': OVERLAPPED}, ('Et|t|t|tL', 2)),
        ('zb-v', {'model.pipeline_model_parallel_size': 1}, (None, None)),
    ],
)
def test_what_is_written_into_the_configuration(bridge_ranks, stock, schedule, changes, expected):
    assert bridge_ranks(2).run(enabling, stock(UNTIED)[0], changes, schedule) == [expected] * 2


OVERLAP = 'overlap_moe_expert_parallel_comm=True'
ROUTES = refuses(WHAT + 'two-way schedules', 'its recipes do not ask whose data a chunk reads')
GROUPS = refuses(
    WHAT + '`dist.use_decentralized_pg`',
    'its groups are made without asking where the schedule has its stages',
)


@pytest.mark.parametrize(
    ('schedule', 'changes', 'message'),
    [
        ('zb-v', {LAYOUT: 'Ett|ttL'}, 'zb-v cannot have 1 chunks per rank'),
        ('zb-v', {'model.virtual_pipeline_model_parallel_size': 3}, 'zb-v.*2'),
        ('zb-v', {LAYOUT: SimpleNamespace()}, 'before config.validate'),
        ('zb-v', {'model.num_layers': 3}, 'layers'),
        ('zb-v', {'model.overlap_moe_expert_parallel_comm': True}, OVERLAP),
        ('zb-v', {'comm_overlap': OVERLAPPED}, f'{OVERLAP}.*take dualpipe-v'),
        ('zb-v', TENSOR, 'tp_comm_overlap=True: Transformer Engine cannot'),
        pytest.param('chimera', {}, REPLICA, marks=ROUTES),
        pytest.param(build('chimera', 4, 4), {}, REPLICA, marks=ROUTES),
        pytest.param('zb-v', {OWN_PG: True}, f'{OWN_PG}=True: its groups are made', marks=GROUPS),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_what_cannot_work(bridge_ranks, stock, schedule, changes, message):
    found = bridge_ranks(2).run(enabling, stock(UNTIED)[0], changes, schedule)
    assert all(isinstance(each, str) and re.search(message, each) for each in found), found


CHUNKS = {'model.virtual_pipeline_model_parallel_size': 2}
STOCK, INTERLEAVED = "Megatron's 1F1B", "Megatron's interleaved schedule"
# schedule, changes to the recipe
RUNS = {
    STOCK: ('megatron', {}),
    INTERLEAVED: ('megatron', CHUNKS),
    'zb-v': ('zb-v', {}),
    'interleaved': ('interleaved', CHUNKS),
}
FLAGS = {
    'train.global_batch_size': 4,  # Megatron's interleaved schedule asks for multiples of ranks
    'checkpoint.save_rng': False,
    'checkpoint.load_rng': False,
    'checkpoint.async_save': False,
}
DISTRIBUTED = {'ddp.use_distributed_optimizer': True, 'optimizer.use_distributed_optimizer': True}
FULL = pytest.mark.full


@pytest.fixture(scope='module')
def run(bridge_ranks, tmp_path_factory):
    """`run(name, changes)`: what LoRA gives by that schedule, on the last rank; or what is said."""
    weights = tmp_path_factory.mktemp('weights')
    bridge_ranks(2).run(recipe.save_weights, weights, LORA, timeout=240)

    def trained(name, changes):
        schedule, own = RUNS[name]
        changes = {**FLAGS, 'checkpoint.hf_source_path': str(weights), **own, **changes}
        return bridge_ranks(2).run(attempt, weights, schedule, changes, timeout=240)[-1]

    return trained


def attempt(weights, schedule, changes):
    try:
        return recipe.train(weights, schedule, False, LORA, changes)
    except ValueError as error:
        return str(error)


@pytest.fixture(scope='module')
def saved(run, tmp_path_factory):
    """By who saves, and with which optimizer: how to go on after two iterations; what then came."""

    @functools.cache
    def trained(name, distributed):
        folder = tmp_path_factory.mktemp('saved')
        flags = DISTRIBUTED if distributed else {}
        whole = run(name, {**flags, **saving(folder)})
        loading = {**flags, 'checkpoint.load': str(folder), 'checkpoint.ckpt_step': 2}
        return loading, whole, folder

    return trained


def saving(folder):
    return {
        'checkpoint.save': str(folder),
        'checkpoint.save_interval': 2,
        'checkpoint.also_save_hf_checkpoint': True,
    }


def adapters(folder):
    """Adapters by Hugging Face's names, of the last iteration, from its file."""
    (file,) = folder.glob('iter_0000004/**/adapter_model.safetensors')
    return file.read_bytes()


def loads(saver, loader, feature='saved by {saver}', schedule='{loader}', full=True):
    shows = supports(f'{WHAT}checkpoints of LoRA, {feature}', schedule)
    return pytest.param(saver, loader, marks=[shows, *[FULL] * full])


@pytest.mark.parametrize(
    ('saver', 'loader'),
    [
        loads(STOCK, 'zb-v', full=False),
        loads('interleaved', 'zb-v'),
        loads('zb-v', 'interleaved'),
        loads(INTERLEAVED, 'zb-v'),
        loads('zb-v', STOCK, 'loaded by Megatron', 'zb-v'),
    ],
)
def test_adapters_go_to_any_placement(run, saved, tmp_path, saver, loader):
    """They are kept by the layers' numbers, in files for Hugging Face, too."""
    loading, whole, folder = saved(saver, False)
    losses, last = whole.losses[2:], folder
    if saver == INTERLEAVED:  # in Bridge it gives other losses than 1F1B
        last = tmp_path / 'stock'
        whole = run(STOCK, {**loading, **saving(last)})
        losses = whole.losses
    found = run(loader, {**loading, **saving(tmp_path / 'ours')})
    assert found.losses == losses and len(found.losses) == 2
    assert found.weights == whole.weights
    assert adapters(tmp_path / 'ours') == adapters(last)


@refuses(
    WHAT + "checkpoint of another placement, with the distributed optimizer's state",
    'that is kept by rank, unless it is fully reshardable',
    'zb-v',
)
@pytest.mark.parametrize(
    ('saver', 'loader', 'held'),
    [
        (INTERLEAVED, 'zb-v', ('E 1 | 3', '2 | 3')),
        pytest.param('zb-v', 'interleaved', ('2 | 3', 'E 1 | 3'), marks=FULL),
        pytest.param(STOCK, 'zb-v', ('E 1-2', '2 | 3'), marks=FULL),
    ],
)
def test_state_by_rank_is_refused(run, saved, saver, loader, held):
    """By name; and the cure that needs no other checkpoint is one."""
    loading, *_ = saved(saver, True)
    said = run(loader, loading)
    assert isinstance(said, str)
    assert "the distributed optimizer's state in this checkpoint is kept by rank" in said
    assert f'rank 0 holds layers {held[0]} by {saver}, but {held[1]} by {loader}' in said
    assert 'checkpoint.load_optim to False' in said
    cured = run(loader, {**loading, 'checkpoint.load_optim': False})
    assert len(cured.losses) == 2
