"""Training from scratch: wherever a layer is, it begins with the weights of stock Megatron."""

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import events
import pytest
from grids import some
from nvidia import needs_training, run
from supported import supports
from test_launch import LLAMA, MOE

pytestmark = needs_training

FLAGS = ['--global-batch-size', 4, '--clip-grad', 1e9, '--train-iters', 2]
P2 = ['--pipeline-model-parallel-size', 2]
P3 = ['--pipeline-model-parallel-size', 3, '--num-layers', 9]
P4 = ['--pipeline-model-parallel-size', 4, '--num-layers', 8]
EXPERTS = [*MOE, *LLAMA, '--expert-model-parallel-size', 2, '--moe-layer-freq', '[0,1,1,1]']
ACCOUNT = ['--num-layers', 7, '--account-for-embedding-in-pipeline-split']
FIRST = ['--num-layers', 8, '--decoder-first-pipeline-num-layers', 2]
LAYOUT = ['--pipeline-model-parallel-layout', 'Ettt||t|L']

# processes, flags
CASES = {
    'tied embeddings': (2, P2),
    'untied embeddings, 4 ranks': (4, [*P4, '--untie-embeddings-and-output-weights']),
    'experts, expert parallel': (4, [*P2, *EXPERTS]),
    'odd ranks, whose stages share a rank of stock': (3, P3),
    'tensor parallel, bf16': (4, [*P2, '--tensor-model-parallel-size', 2, '--bf16']),
    'data parallel random init': (4, [*P2, '--data-parallel-random-init']),
    'initialization on the CPU': (2, [*P2, '--use-cpu-initialization']),
    'stock is interleaved': (2, [*P2, '--num-virtual-stages-per-pipeline-rank', 2]),
    'stock has a layout, with empty stages': (2, [*P2, *LAYOUT]),
    'another number of layers on the first rank': (2, [*P2, *FIRST]),
    'embedding counts as a layer': (2, [*P2, *ACCOUNT]),
}


def require_same_start(ranks, flags, schedule='zb-v', segments=None):
    """Printed losses and norms, and all weights behind two steps, are those of stock Megatron."""
    stock = run(ranks, *FLAGS, *flags, event=events.aliased_sends)
    flags = flags if segments is None else [*flags[:-1], segments]
    ours = run(ranks, *FLAGS, *flags, '--pipeline-schedule', schedule)
    assert len(stock.losses) > 1
    assert ours.losses == stock.losses
    assert printed(ours.grad_norms) == printed(stock.grad_norms)
    assert ours.parameters == stock.parameters


def printed(norms):
    return {at: f'{float.fromhex(norm):.3f}' for at, norm in norms.items()}


@supports('training from scratch, the same start: {case}', 'zb-v')
@some('case', [*CASES][:3], *CASES)
def test_from_scratch(ranks, case):
    size, flags = CASES[case]
    require_same_start(ranks(size), flags)


@supports('training from scratch, the same start: {schedule}')
@pytest.mark.full
@pytest.mark.parametrize('schedule', ['dualpipe', 'hanayo'])
def test_other_placements(ranks, schedule):
    """Two pipelines against each other, and waves of four chunks a rank."""
    size, chunks = {'dualpipe': (4, 1), 'hanayo': (2, 2)}[schedule]
    require_same_start(ranks(size), [*P2, '--num-layers', 4 * chunks], schedule)


def test_own_start(ranks):
    """A flag leaves each rank its own seeds: another training."""
    stock = run(ranks(2), *FLAGS, *P2)
    given = ['--pipeline-schedule', 'zb-v', '--no-pipeline-same-start']
    ours = run(ranks(2), *FLAGS, *P2, *given)
    assert ours.losses[1] != stock.losses[1]


@contextmanager
def layers_built(training):
    """How many layers are alive, at most, while a rank builds its model, and how many it builds."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original, built, most = TransformerLayer.__init__, [], [0]

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        built.append(weakref.ref(self))
        gc.collect()
        most[0] = max(most[0], sum(ref() is not None for ref in built))

    reported = []
    with mock.patch.object(TransformerLayer, '__init__', __init__):
        yield reported
    reported.append((len(built), most[0]))


def test_nothing_is_drawn_twice(ranks):
    """No rank builds or holds more layers than its own."""
    given = ['--pipeline-schedule', 'zb-v']
    ours = run(ranks(2), *FLAGS, *P2, *given, event=layers_built)
    assert [list(each) for each in ours.reported] == [[(2, 2)], [(2, 2)]]
