"""NVIDIA's scripts for other models than GPTs, in a checkout, which MEGATRON_LM names."""

import contextlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from unittest import mock

import bridge
import forked
import pytest
import torch
import torch.distributed as dist
from grids import grid, some
from nvidia import CHECKOUT, COMMON, by, go_on, known, require_same, run, since
from ranks import RankError
from supported import TOLERANCE, absent, refuses, supports
from test_launch import NO_CLIPPING
from test_sliced_models import UNTIED
from test_te_launch import write_tokenizer
from test_todays_models import PATTERNS, SPEC
from test_todays_models import TE_ROPE as TE
from test_todays_models import segments as divided_among
from test_vocabulary_loop import ALL, FLAG, FP32, TIED, near
from wheels import skip_oldest

pytestmark = [
    pytest.mark.te,
    pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it'),
]


LETTERS = 'abcdefghijklmnopqrstuvwxyz'
VOCABULARY = ('[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *LETTERS)
PIPELINE = '--pipeline-model-parallel-size 2 --global-batch-size 6 --clip-grad 1e9'.split()
PIPELINE += '--train-iters 3'.split()
IMAGES = '--img-h 28 --img-w 28 --patch-dim 14 --ckpt-format torch --seq-length 5'.split()


def script(*places: str) -> Path:
    """Return the script, where the checkout has it in one of these places."""
    found = [path for path in (Path(CHECKOUT) / place for place in places) if path.exists()]
    if not found:
        pytest.skip(f'needs a checkout of Megatron-LM with {places[0]}: MEGATRON_LM names it')
    return found[0]


@pytest.fixture
def sentences(te_ranks, tmp_path) -> list[str | Path]:
    """Flags that name documents of sentences, and their tokenizer."""
    te_ranks(2).run(write_sentences, tmp_path / 'text')
    if '--legacy-tokenizer' in te_ranks(2).run(known)[0]:  # until 0.16
        vocabulary = tmp_path / 'vocab.txt'
        vocabulary.write_text('\n'.join(VOCABULARY))
        words = ['--legacy-tokenizer', '--tokenizer-type', 'BertWordPieceLowerCase']
        words += ['--vocab-file', vocabulary]
    else:
        pytest.importorskip('transformers', reason='Megatron has its tokenizers of Hugging Face')
        special = {f'{w[1:-1].lower()}_token': w for w in VOCABULARY if w[0] == '['}
        write_tokenizer(tmp_path / 'words', VOCABULARY, 'WordPiece', **special)
        words = ['--tokenizer-type', 'HuggingFaceTokenizer']
        words += ['--tokenizer-model', tmp_path / 'words']
    return ['--data-path', tmp_path / 'text', *words, '--spec', 'local']


def write_sentences(prefix: Path) -> None:
    """Runs on each rank: the first one writes."""
    if CHECKOUT and CHECKOUT not in sys.path:  # else Megatron-Core were not the script's
        sys.path.insert(0, CHECKOUT)
    import numpy
    from megatron.core.datasets import indexed_dataset

    if dist.get_rank():
        return
    draw = random.Random(7)
    files = indexed_dataset.get_bin_path(str(prefix)), indexed_dataset.get_idx_path(str(prefix))
    builder = indexed_dataset.IndexedDatasetBuilder(files[0], dtype=numpy.uint16)
    for _ in range(40):
        for _ in range(6):
            words = draw.choices(range(5, len(VOCABULARY)), k=draw.randint(3, 6))
            builder.add_item(torch.tensor(words))
        builder.end_document()
    builder.finalize(files[1])


@supports('BERT', 'zb-h1 zb-v zb-2p+post-validation')
def test_bert(te_ranks, tmp_path, sentences):
    """Two losses, attention both ways, tied embeddings; from a checkpoint of Megatron's own."""
    bert = script('pretrain_bert.py', 'examples/bert/pretrain_bert.py')
    flags = [*PIPELINE, *sentences, '--mask-prob', 0.5]  # a loss of no word is not a number
    saving = ['--save', tmp_path / 'saved', '--save-interval', 1]
    stock = run(te_ranks(2), *flags, *saving, script=bert)
    assert len(set(stock.losses.values())) == 3
    flags += ['--load', tmp_path / 'saved', '--ckpt-step', 1]
    for ours in (by('zb-h1'), by('zb-v'), [*by('zb-2p+post-validation')[:-1], 0]):
        require_same(run(te_ranks(2), *flags, *ours, script=bert), stock, 1)


@supports('images and text (`pretrain_vlm.py`), stages of unlike layers', '1f1b zb-h1')
def test_images(te_ranks):
    """The encoder of images makes the first stage longer: it gets fewer layers of the decoder."""
    vlm = script('pretrain_vlm.py')
    flags = [*PIPELINE, *IMAGES, '--decoder-first-pipeline-num-layers', 1]
    stock = run(te_ranks(2), *flags, script=vlm)
    assert len(set(stock.losses.values())) == 3
    for schedule in ('1f1b', 'zb-h1'):
        assert run(te_ranks(2), *flags, *by(schedule), script=vlm) == stock


@refuses(
    'images and text (`pretrain_vlm.py`)',
    'its model provider has no vp_stage: it builds one chunk a rank',
    'zb-v interleaved',
)
@pytest.mark.parametrize('schedule', ['zb-v', 'interleaved'])
def test_images_have_one_chunk_a_rank(te_ranks, schedule):
    vlm = script('pretrain_vlm.py')
    with pytest.raises(RankError, match='has no parameter vp_stage'):
        run(te_ranks(2), *PIPELINE, *IMAGES, *by(schedule), script=vlm)


@refuses(
    'images and text (`pretrain_vlm.py`), a layout of the layers',
    'Megatron would cut the encoder of images as the decoder',
    'zb-h1',
)
def test_images_need_a_whole_encoder(te_ranks):
    """Without the check the encoder of images would have lost layers without a word."""
    vlm = script('pretrain_vlm.py')
    with pytest.raises(RankError, match='whole, but its config has pipeline_model_parallel_layout'):
        flags = [*PIPELINE, *IMAGES, '--num-layers', 5, '--pipeline-schedule', 'zb-h1']
        run(te_ranks(2), *flags, script=vlm)


@refuses('T5', 'Megatron itself has it without pipelines only')
def test_t5_is_megatrons_to_refuse(te_ranks, sentences):
    t5 = script('pretrain_t5.py', 'examples/t5/pretrain_t5.py')
    flags = [*PIPELINE, *sentences, '--vocab-extra-ids', 8, '--decoder-seq-length', 16]
    with pytest.raises(RankError, match='Pipeline parallelism is not supported for T5'):
        run(te_ranks(2), *flags, '--pipeline-schedule', 'zb-h1', script=t5)


OF_HYBRID = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 6, '--train-iters', 3]
SEGMENTS = '--hybrid-layer-pattern'
MAMBA = ['--spec', 'megatron.core.models.mamba.mamba_layer_specs', 'mamba_stack_spec']


@supports('`{named}`: {case}')
@grid(
    named=('pretrain_hybrid.py', 'pretrain_mamba.py'),
    case=tuple(PATTERNS),
    schedule=('zb-v', 'zb-h1', 'interleaved'),
)
def test_unedited(te_ranks, knows_segments, tmp_path, named, case, schedule):
    """From a checkpoint of Megatron's own 1F1B, each goes on as Megatron does."""
    path = script(named)
    pattern, *more = PATTERNS[case]
    flags = [*SPEC, *TE, *NO_CLIPPING, *more, *OF_HYBRID, SEGMENTS]
    theirs = [divided_among(pattern, 2)]
    go_on(te_ranks(2), tmp_path, flags, [pattern, *by(schedule)], theirs=theirs, script=path)


@supports('`pretrain_mamba.py` of one chunk a rank')
@pytest.mark.parametrize('schedule', ['zb-h1', '1f1b'])
def test_one_chunk_a_rank(te_ranks, schedule):
    """Until 0.16, where the pattern has no segments and Megatron divides it."""
    if SEGMENTS in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
    flags = [*MAMBA, *TE, *NO_CLIPPING, *OF_HYBRID, '--num-layers', 8]
    flags += ['--hybrid-override-pattern', '*-*-*-*-']
    stock = run(te_ranks(2), *flags, script=script('pretrain_mamba.py'))
    assert len(set(stock.losses.values())) == 3
    ours = run(
        te_ranks(2), *flags, '--pipeline-schedule', schedule, script=script('pretrain_mamba.py')
    )
    assert ours == stock


@supports('`pretrain_mamba.py` of one chunk a rank, {layers} on all ranks', outcome=TOLERANCE)
@some('layers, schedule', [(TIED, 'zb-h1')], *product(ALL, ('zb-h1', '1f1b')))
def test_one_chunk_a_rank_with_shards(te_ranks, layers, schedule):
    """From scratch: weights begin as stock draws them."""
    if SEGMENTS in te_ranks(2).run(known)[0]:
        absent('hybrid models have segments from 0.17 on')
    layers, _, tied = layers.partition(', ')
    flags = [*MAMBA, *FP32, *NO_CLIPPING, *OF_HYBRID, '--num-layers', 8]
    flags += ['--hybrid-override-pattern', '*-*-*-*-', *([] if tied else UNTIED)]
    stock = run(te_ranks(2), *flags, script=script('pretrain_mamba.py'))
    flags += ['--pipeline-schedule', schedule, FLAG, layers]
    near(run(te_ranks(2), *flags, script=script('pretrain_mamba.py')), stock, 0)


@refuses('hybrid models on a CPU: `M`, `G` and `D`', 'their kernels need a GPU', 'zb-h1')
@pytest.mark.parametrize(
    'letter', ['M (Mamba)', 'G (Gated DeltaNet)', 'D (DeepSeek sparse attention)']
)
def test_layers_of_kernels_are_named(letter):
    """One line before anything is built."""
    words = [*COMMON, *SPEC, *OF_HYBRID, *by('zb-h1'), SEGMENTS, f'*-|*{letter[0]}']
    launcher = [sys.executable, '-m', 'megatron_zbpp.launch', '--cpu', script('pretrain_hybrid.py')]
    done = forked.run([*launcher, *words], env={'WORLD_SIZE': '2'}, timeout=200)
    assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
    said = f'kernels of {letter} need a GPU; have a pattern of other layers (*, -, E, +)'
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.full
@supports('`pretrain_hybrid.py` from a checkpoint of `pretrain_gpt.py`')
@grid(schedule=('zb-v', 'zb-h1', 'interleaved'), saved_by=('megatron', 'zb-v', 'megatron'))
def test_goes_on_as_megatron(te_ranks, tmp_path, schedule, saved_by):
    """By our schedules as by Megatron's own 1F1B; whatever schedule saved it."""
    if not Path(CHECKOUT, 'megatron/core/dist_checkpointing/gpt_checkpoint_interop.py').exists():
        absent('main of August 2026 translates them')
    flags = [*TE, *NO_CLIPPING, *OF_HYBRID]
    saver = [] if saved_by == 'megatron' else by(saved_by)
    gpt = run(te_ranks(2), *flags, *saver, '--save', tmp_path, '--save-interval', 1)
    (pattern,), path = PATTERNS['attention and MLP'], script('pretrain_hybrid.py')
    flags += [*SPEC, '--load', tmp_path, '--ckpt-step', 1, SEGMENTS]
    stock = run(te_ranks(2), *flags, divided_among(pattern, 2), script=path)
    ours = run(te_ranks(2), *flags, pattern, *by(schedule), script=path)
    assert stock.losses == since(1, gpt.losses)
    assert len(ours.losses) == 2
    require_same(ours, stock)


FLAGS = """--perform-rl-step --grpo-prompts-per-step 3 --grpo-group-size 2 --grpo-iterations 2
    --global-batch-size 6 --train-iters 4 --lr 1e-2 --min-lr 1e-2 --grpo-kl-beta 0.1 --bf16
    --transformer-impl transformer_engine --calculate-per-token-loss
    --position-embedding-type rope""".split()
SERVING = ('datasets', 'fastapi', 'httpx', 'openai', 'tensorboard', 'uvicorn', 'wandb', 'yaml')


@contextlib.contextmanager
def rollouts(training: ModuleType) -> Iterator[list]:
    """Runs on each rank: answers come from here; reports what each model scored."""
    missing = [name for name in SERVING if importlib.util.find_spec(name) is None]
    finder = bridge.StandIns(missing, '9')
    sys.meta_path.append(finder)
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
    from megatron.rl import rl_profiling, rl_utils

    known = inspect.signature(rl_utils.prepare_data_for_update).parameters
    # which the loop imports where the packages are there
    imports = {name: own for name, own in vars(rl_profiling).items() if not name.startswith('_')}
    imports = {name: own for name, own in imports.items() if not hasattr(training, name)}
    imports |= {'rl_utils': rl_utils, 'has_rl_utils': True}
    scored, score = [], rl_utils.compute_logprobs_batch

    def answers(*asked):
        groups = [[answer(rl_utils.TokenRollout, group, k) for k in range(2)] for group in range(3)]
        return (groups, {}) if 'request_ledger' in known else groups

    def compute_logprobs_batch(*args, **named):
        scored.append(found := score(*args, **named))
        return found

    try:
        with (
            mock.patch.object(rl_utils, 'get_environment_rollouts', answers),
            mock.patch.object(rl_utils, 'rl_inference_interface_shutdown', lambda: None),
            mock.patch.object(rl_utils, 'compute_logprobs_batch', compute_logprobs_batch),
            mock.patch.multiple(training, **imports, create=True),
            mock.patch.object(NullTokenizer, 'bos_id', None, create=True),
            mock.patch.object(NullTokenizer, 'pad_id', 0),
            # the reference is a copy, as it is of weights on a GPU
            mock.patch.object(torch.Tensor, 'cpu', torch.Tensor.clone),
        ):
            yield scored
    finally:
        sys.meta_path.remove(finder)
        for name in [*sys.modules]:
            own = name.startswith(('megatron.rl', 'torch.utils.tensorboard'))
            if own or name.split('.')[0] in missing:
                del sys.modules[name]
        scored[:] = [[value.hex() for value in each.flatten().tolist()] for each in scored]


def answer(made: type, group: int, k: int):
    """An answer to the prompt of `group`, of another length each."""
    from megatron.training.global_vars import get_tokenizer

    prompt, told = 3 + group, 4 + group + k
    fields = {
        'trajectory': [[*range(10 * k + 1, 10 * k + prompt + told), get_tokenizer().eod]],
        'reward': float(k + group % 2),
        'generation_mask': [[False] * prompt + [True] * told],
        'logprobs': [[-1.0] * told],
        'env_id': 'own',
        'policy_epoch': [[(0, 0)]],
        'kv_cache_epoch': [[(0, 0)]],
        'num_evictions': [0],
    }
    return made(**{name: value for name, value in fields.items() if name in made.model_fields})


@supports('`train_rl.py` with given answers')
@grid(schedule=('zb-h1', 'zb-h1+post-validation', '1f1b'))
def test_reinforcement_learning(request, te_ranks, tmp_path, schedule):
    """Log probabilities of policy and reference, losses and weights."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    path = script('train_rl.py')
    flags = [*FLAGS, *NO_CLIPPING, '--pipeline-model-parallel-size', 2]
    stock = run(te_ranks(2), *flags, event=rollouts, script=path)
    ours = run(te_ranks(2), *flags, *by(schedule), event=rollouts, script=path)
    assert len(stock.losses) == 4
    assert len(set(stock.losses.values())) == 3  # the first step has a rate of 0
    (policy, reference, later, again), _ = stock.reported
    assert policy == reference == again != later
    assert ours == stock
