"""Sequences packed behind each other, of other lengths in each microbatch, in NVIDIA's loop."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from grids import grid
from nvidia import CHECKOUT, by, go_on, known, needs_training, require_same, run
from supported import supports
from test_launch import NO_CLIPPING
from wheels import skip_oldest

pytestmark = [
    pytest.mark.te,
    needs_training,
    pytest.mark.skipif(
        CHECKOUT is not None and find_spec('datasets') is None,
        reason="needs datasets: NVIDIA's script reads with it",
    ),
]

PACKED = """--sft --no-create-attention-mask-in-dataloader --position-embedding-type rope
    --transformer-impl transformer_engine --bf16 --calculate-per-token-loss""".split()


@supports('packed sequences (`--sft`)')
@grid(schedule=('zb-v', 'zb-h1+post-validation', 'interleaved', 'dualpipe-v'), p=(2, 2, 2, 4))
def test_identical_to_megatron(request, te_ranks, tmp_path, schedule, p):
    """From a checkpoint of Megatron's own 1F1B; every stage reads where the sequences end."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    flags = [*PACKED, *NO_CLIPPING, '--pipeline-model-parallel-size', p, '--num-layers', 2 * p]
    flags += ['--global-batch-size', 6, '--train-iters', 4]
    go_on(te_ranks(p), tmp_path, flags, by(schedule))


WORDS = [f'word{number}' for number in range(40)]
# what the template of that format writes, and says by it
TURNS = [*(f'<SPECIAL_{role}' for role in ('10>System', '11>User', '11>Assistant', '12>'))]
FORMAT = """--tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format nemotron-nano-v2
    --seq-length 64 --max-position-embeddings 64""".split()


@pytest.fixture(scope='module')
def conversations(tmp_path_factory) -> list[str | Path]:
    """Flags that name them, and their tokenizer."""
    pytest.importorskip('datasets', reason="Megatron's data set reads with it")
    pytest.importorskip('transformers', reason="Megatron's tokenizer is one of Hugging Face's")
    folder = tmp_path_factory.mktemp('sft')
    write_tokenizer(folder / 'words')
    draw = random.Random(7)
    lines = [{'messages': [*several(draw)]} for _ in range(40)]
    (folder / 'text.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    return ['--data-path', folder / 'text.jsonl', '--tokenizer-model', folder / 'words']


def several(draw: random.Random):
    """Two or three, each of some words."""
    for _ in range(draw.randint(2, 3)):
        for role in ('system', 'user', 'assistant'):
            words = draw.choices(WORDS, k=draw.randint(1, 4))
            yield {'role': role, 'content': ' '.join(words)}


def write_tokenizer(folder: Path) -> None:
    """A token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(['<unk>', *TURNS, *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token='<unk>'))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {'unk_token': '<unk>', 'pad_token': '<unk>', 'eos_token': TURNS[-1]}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


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
