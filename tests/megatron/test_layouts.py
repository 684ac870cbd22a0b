"""Layers and samples that are not alike, in NVIDIA's loop: layouts, specifications, masks."""

import json
import random
from dataclasses import replace

import nvidia
import torch
from grids import grid
from nvidia import by, go_on, needs_training, require_same, run
from supported import supports
from test_launch import LLAMA, NO_CLIPPING, PIPELINE, TENSOR

from megatron_zbpp import Layer, Layers, Placement, partition

pytestmark = needs_training


FLAGS = """--untie-embeddings-and-output-weights --position-embedding-type rope
    --clip-grad 1e9 --global-batch-size 6 --train-iters 3 --num-layers 4""".split()


@supports('stages without layers in a layout', '{schedule}')
@grid(layout=('E|tttt||L', 'Ett||tt|L'), schedule=('zb-h1', '1f1b', 'zb-v', 'interleaved'))
def test_stages_without_layers(ranks, layout, schedule):
    """On a rank each, or two on a rank, by Megatron's interleaved schedule."""
    p = 2 if schedule in ('zb-v', 'interleaved') else 4
    flags = [*FLAGS, '--pipeline-model-parallel-size', p]
    flags += ['--pipeline-model-parallel-layout', layout]
    stock = run(ranks(p), *flags)
    assert len(set(stock.losses.values())) == 3
    ours = run(ranks(p), *flags, *by(schedule))
    assert replace(ours, grad_norms=stock.grad_norms) == stock
    assert ours.grad_norms == stock.grad_norms or schedule == 'zb-v', 'summed in another order'


HEAVY_HEAD = Layers((Layer('E', 1, 0, 1), *[Layer('t', 2, 2, 2)] * 4, Layer('L', 6, 6, 6)))
COMMON = '--pipeline-model-parallel-size 2 --global-batch-size 4 --train-iters 4'.split()
COMMON += '--clip-grad 1e9 --untie-embeddings-and-output-weights'.split()


def plan(folder, placement):
    """Our flags, and the layout that they bring."""
    found = partition(HEAVY_HEAD, 2, 4, placements=[placement], seconds=1)
    (file := folder / 'plan.json').write_text(json.dumps(found.facts()))
    return ['--pipeline-schedule-file', file], found.layout


def test_trains_as_stock_of_the_same_layout(ranks, tmp_path):
    """To the bit; and stock Megatron, its layers evenly divided, goes on from a checkpoint."""
    flags, layout = plan(tmp_path, Placement.loop(2))
    assert layout == 'Ettt|tL'
    stock = run(ranks(2), *COMMON, '--pipeline-model-parallel-layout', layout)
    ours = run(ranks(2), *COMMON, *flags, '--save', tmp_path, '--save-interval', 2)
    require_same(ours, stock)
    require_same(run(ranks(2), *COMMON, '--load', tmp_path, '--ckpt-step', 2), stock, 2)


def test_goes_on_from_a_checkpoint_of_stock(ranks, tmp_path):
    """In a V, whose ranks have other layers."""
    go_on(ranks(2), tmp_path, COMMON, plan(tmp_path, Placement.v(2))[0])


def heterogeneous(folder):
    """Flags of layers that have attention or an MLP, a linear layer in its place, or nothing."""

    def part(name, size):
        kind = {'no_op': size == 'none', 'replace_with_linear': size == 'linear'}
        return kind | {name: None if isinstance(size, str) else size}

    # heads of each group of attention, width of the MLP by that of hidden states
    layers = (2, 2.625), ('none', 9.0), (2, 'linear'), ('linear', 2.625), (2, 'none'), (2, 9.0)
    path = folder / 'layers.json'
    sizes = {
        'hidden_act': 'silu',
        'num_hidden_layers': len(layers),
        'hidden_size': 32,
        'num_attention_heads': 4,
        'tie_word_embeddings': False,
        'rope_theta': 10000,
        'rope_scaling': {'factor': 8.0},
        'block_configs': [
            {'attention': part('n_heads_in_group', heads), 'ffn': part('ffn_mult', width)}
            for heads, width in layers
        ],
    }
    path.write_text(json.dumps(sizes))
    given = ['--num-layers', len(layers), '--heterogeneous-layers-config-path', path]
    given += ['--use-rotary-position-embeddings', '--use-rope-scaling']
    return [*PIPELINE, *NO_CLIPPING, *LLAMA, *given, '--train-iters', 3]


@supports("NVIDIA's loop: heterogeneous layers")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-h1', 'zb-2p+post-validation'))
def test_heterogeneous_layers(ranks, tmp_path, schedule):
    """From a checkpoint of Megatron's own 1F1B."""
    go_on(ranks(2), tmp_path, heterogeneous(tmp_path), by(schedule))


ENDS = [254, 255]  # of a document: by the tokenizer of megatron-core 0.19, and of 0.16
RESET = ['--reset-attention-mask', '--reset-position-ids', '--eod-mask-loss']


def write_documents(prefix):
    """Runs on a rank: documents much shorter than a sample."""
    nvidia._find_megatron()
    import numpy
    from megatron.core.datasets import indexed_dataset

    draw = random.Random(7)
    files = indexed_dataset.get_bin_path(str(prefix)), indexed_dataset.get_idx_path(str(prefix))
    builder = indexed_dataset.IndexedDatasetBuilder(files[0], dtype=numpy.uint16)
    for _ in range(100):
        words = draw.choices(range(ENDS[0]), k=draw.randint(2, 8))
        builder.add_item(torch.tensor([*words, *ENDS]))
        builder.end_document()
    builder.finalize(files[1])


@supports("NVIDIA's loop: masks between documents")
@grid(schedule=('zb-v', 'zb-interleaved', 'zb-v+post-validation'), tensor=(False, True, False))
def test_masks_between_documents(ranks, tmp_path, schedule, tensor):
    """From a checkpoint of Megatron's own 1F1B, both of whose stages have the masks."""
    ranks(1).run(write_documents, tmp_path / 'text')
    flags = [*PIPELINE, *NO_CLIPPING, '--data-path', tmp_path / 'text', '--train-iters', 4]
    flags += TENSOR if tensor else []
    found, _ = go_on(ranks(4 if tensor else 2), tmp_path, [*flags, *RESET], by(schedule))
    if not tensor:
        loading = ['--load', tmp_path, '--ckpt-step', 1, *by(schedule.partition('+')[0])]
        plain = run(ranks(2), *flags, *RESET[1:], *loading)
        assert plain.losses != found.losses, 'masks make a difference'
