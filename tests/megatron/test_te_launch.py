"""NVIDIA's own training loop on Transformer Engine's layers, by the launcher; sequences packed
behind each other, of other lengths in each microbatch, among them."""

import json
import random
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import commands
import pytest
from defined import require_defined, watched
from gpu import CUDA
from grids import grid
from nvidia import CHECKOUT, COMMON, SCRIPT, by, go_on, known, needs_training, require_same, run
from supported import supports
from test_launch import DISTRIBUTED, LLAMA, MOE, NO_CLIPPING, OVERLAP, PIPELINE
from test_same_start import P2, require_same_start
from wheels import NEWEST, skip_oldest, transformer_engine

import megatron_zbpp

pytestmark = pytest.mark.te
on_cpu = pytest.mark.skipif(CUDA, reason='--cpu is for machines without')
TE = ['--transformer-impl', 'transformer_engine', '--bf16']
FP8 = ['--fp8-format', 'hybrid', '--fp8-recipe', 'tensorwise']
CASES = {
    'dense': ['--disable-bias-linear', *OVERLAP],
    'grouped experts': [*LLAMA, *MOE, '--moe-grouped-gemm', *OVERLAP],
    'FP8 weights': [*FP8, '--fp8-param-gather', *DISTRIBUTED],
}


@on_cpu
@supports("NVIDIA's loop on Transformer Engine's layers: {case}")
@needs_training
@grid(case=tuple(CASES), schedule=('zb-h1', 'zb-v'))
def test_identical_to_megatron(te_ranks, tmp_path, case, schedule):
    """From a checkpoint that Megatron's own 1F1B saved, every schedule goes on as it does. And each
    gradient that reaches DistributedDataParallel is defined: see `defined`."""
    flags = [*PIPELINE, *NO_CLIPPING, *TE, *CASES[case], '--train-iters', 4]
    how = {'event': watched, 'at': 2, 'sharded': DISTRIBUTED[0] in flags}
    ours, _ = go_on(te_ranks(2), tmp_path, flags, by(schedule), **how)
    require_defined(ours.reported, fused=True)


@on_cpu
@supports("training from scratch, the same start: Transformer Engine's layers, {case}", 'zb-v')
@needs_training
@pytest.mark.full
@pytest.mark.parametrize('case', ['grouped experts', 'FP8 weights'])
def test_from_scratch(te_ranks, case):
    require_same_start(te_ranks(2), [*P2, *TE, *CASES[case], '--te-rng-tracker'])


@on_cpu
@pytest.mark.one_release
def test_without_transformer_engine():
    command = [sys.executable, '-m', 'megatron_zbpp.launch', '--cpu', SCRIPT, *COMMON, *TE]
    done = commands.run(command, timeout=200)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        'python -m megatron_zbpp.launch: error: no transformer_engine in sys.path: pip install'
    )


@on_cpu
@pytest.mark.one_release
def test_children_have_it(tmp_path):
    """A process that a run starts, in any folder, emulates Transformer Engine as the run does."""
    children = Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook'
    code = (
        'import megatron.core, json, transformer_engine.pytorch as te\n'
        'from devtools.te import installed\n'
        'print(json.dumps([installed(), te.__file__]))'
    )
    folder = transformer_engine(NEWEST)
    environment = {'PYTHONPATH': str(children), 'MEGATRON_ZBPP_EMULATED_TE': str(folder)}
    done = commands.run([sys.executable, '-c', code], cwd=tmp_path, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    emulated, file = json.loads(done.stdout.splitlines()[-1])
    assert emulated and Path(file).is_relative_to(folder)


needs_packed = pytest.mark.skipif(
    CHECKOUT is not None and find_spec('datasets') is None,
    reason="needs datasets: NVIDIA's script reads with it",
)
PACKED = """--sft --no-create-attention-mask-in-dataloader --position-embedding-type rope
    --transformer-impl transformer_engine --bf16 --calculate-per-token-loss""".split()


@needs_packed
@needs_training
@supports('packed sequences (`--sft`)')
@grid(schedule=('zb-v', 'zb-h1+post-validation', 'interleaved', 'dualpipe-v'), p=(2, 2, 2, 4))
def test_packed(request, te_ranks, tmp_path, schedule, p):
    """From a checkpoint of Megatron's own 1F1B; every stage reads where the sequences end."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    flags = [*PACKED, *NO_CLIPPING, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--global-batch-size', 6, '--train-iters', 4]
    go_on(te_ranks(p), tmp_path, flags, by(schedule))


WORDS = [f'word{number}' for number in range(40)]
# what the template of that format writes, and says by it
TURNS = [f'<SPECIAL_{role}' for role in ('10>System', '11>User', '11>Assistant', '12>')]
FORMAT = """--tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format nemotron-nano-v2
    --seq-length 64 --max-position-embeddings 64""".split()


@pytest.fixture(scope='module')
def conversations(tmp_path_factory) -> list[str | Path]:
    """Flags that name them, and their tokenizer."""
    pytest.importorskip('datasets', reason="Megatron's data set reads with it")
    pytest.importorskip('transformers', reason="Megatron's tokenizer is one of Hugging Face's")
    folder = tmp_path_factory.mktemp('sft')
    special = {'unk_token': '<unk>', 'pad_token': '<unk>', 'eos_token': TURNS[-1]}
    write_tokenizer(folder / 'words', ['<unk>', *TURNS, *WORDS], 'WordLevel', **special)
    draw = random.Random(7)
    lines = [{'messages': messages(draw)} for _ in range(40)]
    (folder / 'text.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    return ['--data-path', folder / 'text.jsonl', '--tokenizer-model', folder / 'words']


def messages(draw: random.Random) -> list[dict[str, str]]:
    """Two or three turns of each role, each of some words."""
    roles = ['system', 'user', 'assistant'] * draw.randint(2, 3)
    said = (draw.choices(WORDS, k=draw.randint(1, 4)) for _ in roles)
    return [
        {'role': role, 'content': ' '.join(words)} for role, words in zip(roles, said, strict=True)
    ]


def write_tokenizer(folder: Path, words: Iterable[str], model: str, **special: str) -> None:
    """As `AutoTokenizer` reads it: a model of that name, of these words, some of them special."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(getattr(models, model)(numbers, unk_token=special['unk_token']))
    if model == 'WordLevel':
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


@needs_packed
@needs_training
@pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it')
@supports("NVIDIA's `--sft`", 'zb-v zb-h1 zb-h1+post-validation')
def test_conversations(request, te_ranks, conversations, tmp_path):
    """Of random lengths, packed by NVIDIA's own data set; from a checkpoint of Megatron's 1F1B. Its
    data set and tokenizer want `pip install 'transformers<5' 'datasets<4.5'`."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    flags = [*PACKED, *FORMAT, *NO_CLIPPING, *conversations, '--pipeline-model-parallel-size', 2]
    flags += ['--global-batch-size', 6, '--train-iters', 4]
    flags += {'--legacy-tokenizer'} & te_ranks(2).run(known)[0]  # until 0.16
    stock = run(te_ranks(2), *flags, '--save', tmp_path, '--save-interval', 1)
    assert len(set(stock.losses.values())) == 4
    flags += ['--load', tmp_path, '--ckpt-step', 1]
    for schedule in ('zb-h1', 'zb-v', 'zb-h1+post-validation'):
        require_same(run(te_ranks(2), *flags, *by(schedule)), stock, 1)
