"""References that are served: trained once, they find a small error of ours as before."""

from collections import Counter

import example
import nvidia
import pytest
import stock
from events import before
from nvidia import needs_training, since
from test_launch import NO_CLIPPING, PIPELINE

FLAGS = ['--num-layers', 4, '--pipeline-model-parallel-size', 2, '--clip-grad', 1e9]
FLAGS += ['--global-batch-size', 4, '--train-iters', 3]


@pytest.fixture(autouse=True)
def served_from_the_second_on(tmp_path, monkeypatch):
    monkeypatch.setenv(stock.FOLDER, str(tmp_path / 'cache'))
    monkeypatch.setattr(stock, 'FRESH', False)
    monkeypatch.setattr(stock, '_due', lambda *_: False)
    monkeypatch.setattr(stock, 'counted', Counter())
    if stock.folder() is None:
        pytest.skip('on a GPU, or with a checkout of Megatron-LM, nothing is kept')


def spoilt(argv):
    """As `measured`, with gradients of weights that are a bit too large."""
    import pretrain_gpt as script

    def spoil(models, *_, **__):
        for parameter in models[-1].parameters():
            parameter.main_grad.mul_(1 + 1e-7)

    with before((script, 'finalize_model_grads', spoil)):
        return example.measured(argv)


def test_a_small_error_differs(ranks, data):
    flags = [*FLAGS, '--data-path', data]
    trained, served = (
        example.run(ranks(2), *flags, '--pipeline-schedule', 'megatron') for _ in range(2)
    )
    assert stock.counted == {'trained': 1, 'served': 1} and served == trained
    assert example.run(ranks(2), *flags, '--pipeline-schedule', 'zb-h1') == served
    words = [*example.MODEL, *map(str, flags), '--pipeline-schedule', 'zb-h1']
    found = ranks(2).run(spoilt, words)[-1]
    assert found.losses[0] == served.losses[0]
    assert found.parameters != served.parameters


@needs_training
def test_a_served_checkpoint_is_loaded(ranks, tmp_path):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 3]
    expected = [
        nvidia.run(ranks(2), *flags, '--save', tmp_path / name, '--save-interval', 1)
        for name in ('trained', 'served')
    ]
    assert stock.counted == {'trained': 1, 'served': 1} and expected[0] == expected[1]
    loading = ['--load', tmp_path / 'served', '--ckpt-step', 1, '--pipeline-schedule', 'zb-v']
    found = nvidia.run(ranks(2), *flags, *loading)
    assert found.losses == since(1, expected[1].losses)
    assert found.parameters == expected[1].parameters
    assert found.optimizer == expected[1].optimizer
