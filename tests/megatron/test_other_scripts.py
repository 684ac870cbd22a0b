"""NVIDIA's scripts for other models than GPTs; they are in a checkout, which MEGATRON_LM names."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from nvidia import CHECKOUT, known, run, since
from ranks import RankError
from supported import refuses, supports

pytestmark = [
    pytest.mark.te,  # their scripts import layers of Transformer Engine's
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
        write_tokenizer(tmp_path / 'words')
        words = ['--tokenizer-type', 'HuggingFaceTokenizer']
        words += ['--tokenizer-model', tmp_path / 'words']
    return ['--data-path', tmp_path / 'text', *words, '--spec', 'local']


def write_tokenizer(folder: Path) -> None:
    """Of the same words, as `AutoTokenizer` reads it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    words = Tokenizer(models.WordPiece(numbers, unk_token='[UNK]'))
    named = {f'{word[1:-1].lower()}_token': word for word in VOCABULARY if word[0] == '['}
    PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(folder)


def write_sentences(prefix: Path) -> None:
    """Runs on each rank: the first one writes."""
    if CHECKOUT and CHECKOUT not in sys.path:  # else Megatron-Core were not the script's
        sys.path.insert(0, CHECKOUT)
    import numpy
    import torch
    import torch.distributed as dist
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
    for schedule in ('zb-h1', 'zb-v', 'zb-2p'):
        loading = ['--load', tmp_path / 'saved', '--ckpt-step', 1]
        early = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', 0]
        flags_of = [*loading, '--pipeline-schedule', schedule, *(early * (schedule == 'zb-2p'))]
        ours = run(te_ranks(2), *flags, *flags_of, script=bert)
        assert ours.losses == since(1, stock.losses), schedule
        assert ours.parameters == stock.parameters, schedule
        assert ours.optimizer == stock.optimizer, schedule


@supports('images and text (`pretrain_vlm.py`), stages of unlike layers', '1f1b zb-h1')
def test_images(te_ranks):
    """The encoder of images makes the first stage longer: it gets fewer layers of the decoder."""
    vlm = script('pretrain_vlm.py')
    flags = [*PIPELINE, *IMAGES, '--decoder-first-pipeline-num-layers', 1]
    stock = run(te_ranks(2), *flags, script=vlm)
    assert len(set(stock.losses.values())) == 3
    for schedule in ('1f1b', 'zb-h1'):
        assert run(te_ranks(2), *flags, '--pipeline-schedule', schedule, script=vlm) == stock


@refuses(
    'images and text (`pretrain_vlm.py`)',
    'its model provider has no vp_stage: it builds one chunk a rank',
    'zb-v interleaved',
)
@pytest.mark.parametrize('schedule', ['zb-v', 'interleaved'])
def test_images_have_one_chunk_a_rank(te_ranks, schedule):
    vlm = script('pretrain_vlm.py')
    with pytest.raises(RankError, match='has no parameter vp_stage'):
        run(te_ranks(2), *PIPELINE, *IMAGES, '--pipeline-schedule', schedule, script=vlm)


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
