"""NVIDIA's own `--sft`: conversations of random lengths, packed behind each other by its data set.

Its script is in a checkout, which MEGATRON_LM names; its data set and tokenizer want
`pip install 'transformers<5' 'datasets<4.5'`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from nvidia import CHECKOUT, known, needs_training, run, since
from supported import supports
from test_launch import NO_CLIPPING
from test_launch_post_validation import EARLY
from wheels import skip_oldest

pytestmark = [
    pytest.mark.te,
    needs_training,
    pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it'),
]
WORDS = [f'word{number}' for number in range(40)]
# what the template of that format writes, and says by it
TURNS = [*(f'<SPECIAL_{role}' for role in ('10>System', '11>User', '11>Assistant', '12>'))]
FLAGS = """--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format nemotron-nano-v2
    --no-create-attention-mask-in-dataloader --position-embedding-type rope --seq-length 64
    --max-position-embeddings 64
    --transformer-impl transformer_engine --bf16 --calculate-per-token-loss
    --global-batch-size 6 --train-iters 4""".split()


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


@supports("NVIDIA's `--sft`", 'zb-v zb-h1 zb-h1+post-validation')
def test_identical_to_megatron(request, te_ranks, conversations, tmp_path):
    """From a checkpoint of Megatron's own 1F1B."""
    skip_oldest(request, 'has no attention to packed sequences without a GPU')
    flags = [*FLAGS, *NO_CLIPPING, *conversations, '--pipeline-model-parallel-size', 2]
    flags += {'--legacy-tokenizer'} & te_ranks(2).run(known)[0]  # until 0.16
    stock = run(te_ranks(2), *flags, '--save', tmp_path, '--save-interval', 1)
    assert len(set(stock.losses.values())) == 4
    for schedule, early in (('zb-h1', []), ('zb-v', []), ('zb-h1', EARLY)):
        ours = ['--load', tmp_path, '--ckpt-step', 1, '--pipeline-schedule', schedule, *early]
        found = run(te_ranks(2), *flags, *ours)
        assert found.losses == since(1, stock.losses), schedule
        assert found.parameters == stock.parameters, schedule
        assert found.optimizer == stock.optimizer, schedule
