"""Toys of today's models in NVIDIA's loop, hybrid ones and multi-token prediction among them: to
the bit as by Megatron."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import events
import pytest
import wheels
from grids import grid, some
from nvidia import by, go_on, known, needs_training, run, since
from ranks import Pool, RankError, Ranks
from supported import TOLERANCE, absent, refuses, supports
from test_auto import told
from test_launch import MOE, NO_CLIPPING
from test_same_start import P2, P4, require_same_start
from test_te_launch import TE
from wheels import skip_oldest

from megatron_zbpp.mcore import compat

pytestmark = needs_training


NORMS = '--normalization RMSNorm --untie-embeddings-and-output-weights'.split()
BASE = [*NORMS, *'--swiglu --position-embedding-type rope --disable-bias-linear'.split()]
QUERY_GROUPS = ['--group-query-attention', '--num-query-groups', 2, '--kv-channels', 16]
EXPERTS = ['--moe-token-dispatcher-type', 'alltoall', '--moe-router-load-balancing-type']
# attention to what is projected on few channels; scores by a sigmoid and a bias that balances them;
# groups of experts, one expert that all tokens share, none in the first layers; two tokens at once
LATENT = """--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm
    --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32
    --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5
    --moe-aux-loss-coeff 1e-2 --mtp-num-layers 1""".split()
MANY = """--num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 4 --moe-aux-loss-coeff 1e-3
    --qk-layernorm""".split()
# every other layer attends to a window; a learnt share of attention goes nowhere
SINKS = """--window-size 4,0 --window-attn-skip-freq 2 --softmax-type learnable
    --position-embedding-type yarn --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0""".split()
MODELS = {
    'DeepSeek-V3': [*BASE, *LATENT, *EXPERTS, 'seq_aux_loss'],
    'Qwen3 MoE': [*BASE, *QUERY_GROUPS, *MANY, *EXPERTS, 'global_aux_loss'],
    'Llama 3': [*BASE, *QUERY_GROUPS, '--use-rope-scaling', '--rotary-base', 500000],
    'GPT-OSS': [*NORMS, *QUERY_GROUPS, *SINKS, *EXPERTS, 'none'],
}


@supports('a toy of {model}')
@grid(model=('Qwen3 MoE', 'Llama 3', 'GPT-OSS'), schedule=('auto', 'zb-v'), p=(2, 4))
def test_identical_to_megatron(ranks, tmp_path, model, schedule, p):
    """Of Megatron's own layers, whose experts cannot have biases."""
    if model == 'GPT-OSS':
        needs_yarn(ranks(p))
    compare(ranks(p), tmp_path, p, [*MODELS[model], '--disable-bias-linear'], schedule)


def needs_yarn(ranks: Ranks) -> None:
    if '--position-embedding-type yarn' not in ranks.run(known)[0]:
        absent("NVIDIA's script has no flag for YaRN")


@pytest.mark.te
@supports('a toy of {model}, experts in one product')
@grid(model=('DeepSeek-V3', 'GPT-OSS'), schedule=('zb-v+post-validation', 'auto'))
@some('p', [2], 4)
def test_transformer_engine(request, te_ranks, tmp_path, model, schedule, p):
    """Of layers that only Transformer Engine has."""
    flags = [*MODELS[model], *TE, '--moe-grouped-gemm']
    if model == 'GPT-OSS':
        needs_yarn(te_ranks(p))
        skip_oldest(request, 'does not initialise the share of attention that goes nowhere')
    if model == 'DeepSeek-V3':
        flags += ['--moe-layer-freq', f'[0]*{p // 2}+[1]*{2 * p - p // 2}']
    compare(te_ranks(p), tmp_path, p, flags, schedule)


def compare(ranks: Ranks, folder: Path, p: int, flags: list, schedule: str) -> None:
    """Goes on from a checkpoint of Megatron's own 1F1B, and leaves what it leaves. `auto` switches
    to what it has planned, whenever the planner answers: losses are the same."""
    iterations = {'auto': 7, 'zb-v': 3}.get(schedule, 5)
    flags = [*flags, *NO_CLIPPING, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--global-batch-size', 6, '--train-iters', iterations]
    ours = [*by(schedule), '--pipeline-schedule-profile-iters', 1]
    event = partial(told, switching=True, seconds=2)
    found, _ = go_on(ranks, folder, flags, ours, event=event)
    assert any('switches' in line for line in found.reported[0]) == (schedule == 'auto')


SPEC = ['--spec', 'megatron.core.models.hybrid.hybrid_layer_specs', 'hybrid_stack_spec']
TE_ROPE = [*TE, '--position-embedding-type', 'rope']
PATTERN = '--hybrid-layer-pattern'
PATTERNS = {
    'attention and MLP': ['*-*-*-*-'],
    'experts': ['*E*E*E*E', *MOE, '--disable-bias-linear'],
    'more tokens': ['*-*-*-*-/*-', '--untie-embeddings-and-output-weights'],
}


@pytest.mark.te
@supports('HybridModel: {case}')
@grid(
    schedule=('zb-v', 'zb-h1', 'zb-interleaved', 'dualpipe-v'), case=tuple(PATTERNS), p=(2, 4, 2, 2)
)
def test_hybrid_models(te_ranks, knows_segments, tmp_path, schedule, case, p):
    """From a checkpoint of Megatron's own 1F1B; the pattern is divided for the schedule."""
    pattern, *more = PATTERNS[case]
    main, slash, rest = pattern.partition('/')
    pattern = main * (p // 2) + slash + rest  # each rank has experts: see docs/limits.md
    flags = [*SPEC, *TE_ROPE, *NO_CLIPPING, *more, '--global-batch-size', 6, '--train-iters', 3]
    flags += ['--num-layers', 4 * p, '--pipeline-model-parallel-size', p]
    divided = segments(pattern, p)
    own = [*by(schedule), PATTERN, divided if schedule == 'zb-h1' else pattern]
    go_on(te_ranks(p), tmp_path, flags, own, theirs=[PATTERN, divided])


@pytest.mark.te
@supports('training from scratch, the same start: HybridModel', 'zb-v')
@pytest.mark.full
def test_from_scratch(te_ranks, knows_segments):
    pattern, *more = PATTERNS['more tokens']
    flags = [*SPEC, *TE_ROPE, *more, *P2, '--num-layers', 8, PATTERN]
    require_same_start(te_ranks(2), [*flags, segments(pattern, 2)], segments=pattern)


@pytest.mark.te
@supports('HybridModel in slices of sequences: attention, MLP and experts', outcome=TOLERANCE)
@pytest.mark.parametrize('schedule', ['zb-v'])
def test_in_slices(te_ranks, knows_segments, tmp_path, schedule):
    if te_ranks(2).run(compat.hybrid_model)[0] is None:
        absent('from 0.18 on')
    pattern, more = '*-*E*-*E', PATTERNS['experts'][1:]
    flags = [*SPEC, *TE_ROPE, *NO_CLIPPING, *more, '--global-batch-size', 4, '--train-iters', 3]
    flags += ['--num-layers', 8, '--pipeline-model-parallel-size', 2]
    saving, loading = ['--save', tmp_path, '--save-interval', 1], ['--load', tmp_path]
    stock = run(te_ranks(2), *flags, PATTERN, segments(pattern, 2), *saving)
    ours = [PATTERN, pattern, '--pipeline-slices', 4, *loading, '--ckpt-step', 1]
    ours = run(te_ranks(2), *flags, *ours, *by(schedule))
    for iteration, (loss, *_) in since(1, stock.losses).items():
        found = float.fromhex(ours.losses[iteration][0])
        assert math.isclose(found, float.fromhex(loss), rel_tol=1e-3)  # in bf16


def segments(pattern: str, stages: int) -> str:
    """The same with segments of equal length."""
    main, slash, rest = pattern.partition('/')
    each = len(main) // stages
    return '|'.join(main[i : i + each] for i in range(0, len(main), each)) + slash + rest


SEEDS = ['--pipeline-dropout-seeds']
Layers = tuple[Callable[[int], Ranks], list]
MTP = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3""".split()


def mtp(te: list, p: int, depth: int, *more: object) -> list:
    """Flags of a model of two layers a rank that predicts so many more tokens."""
    sizes = ['--pipeline-model-parallel-size', p, '--num-layers', 2 * p, '--mtp-num-layers', depth]
    return [*MTP, *te, *sizes, *more]


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
def test_multi_token_prediction_from_scratch(layers):
    """The last rank draws a copy of the embedding before its layers, some of which others hold."""
    ranks, te = layers
    require_same_start(ranks(4), [*MTP, *te, *P4, '--mtp-num-layers', 2])


@supports('multi-token prediction, depth {depth}')
@grid(depth=(1, 2), p=(2, 4), schedule=('zb-h1', 'zb-v', 'dualpipe-v', 'interleaved', 'auto'))
def test_multi_token_prediction(layers, tmp_path, depth, p, schedule):
    """From a checkpoint that Megatron's own 1F1B saved; its layout is that of one chunk a rank."""
    ranks, te = layers
    _, stock = go_on(ranks(p), tmp_path, mtp(te, p, depth), by(schedule))
    assert {'mtp', 'embedding'} <= stock.parameters.keys()


@supports('multi-token prediction, depth 2', '{schedule}+post-validation')
@pytest.mark.parametrize('schedule', ['zb-2p', 'zb-v'])
def test_post_validation(layers, tmp_path, schedule):
    """Losses of forwards that ran ahead are logged with their own iteration."""
    ranks, te = layers
    flags, ours = mtp(te, 2, 2, '--train-iters', 5), by(f'{schedule}+post-validation')
    logs = {'event': events.mtp_losses, 'stock_event': events.mtp_losses}
    ours, stock = go_on(ranks(2), tmp_path, flags, ours, **logs)
    assert ours.reported[-1] == stock.reported[-1][1:]
    assert len({tuple(losses) for losses in stock.reported[-1]}) == 5, 'of the rank that has them'


@supports(
    'dropout seeded as in our 1f1b with `--pipeline-dropout-seeds`: multi-token prediction', 'zb-v'
)
def test_dropout_seeds(layers):
    """From scratch; its layers have masks of their own, and those of its embedding go with them."""
    ranks, te = layers
    flags = mtp(te, 2, 2, '--hidden-dropout', 0.1, '--attention-dropout', 0.1)
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
    layout = f'Etttt|tttt|{"m" * depth}|L'
    flags = mtp(te, 4, depth, '--pipeline-model-parallel-layout', layout)
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
    flags = mtp(te, 2, 1, '--pipeline-model-parallel-layout', 'Ett|tt|m|L')
    with pytest.raises(RankError, match='before the stage of the loss'):
        run(ranks(2), *flags, *by('zb-v'))
