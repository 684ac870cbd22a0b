"""A schedule of one's own by `--pipeline-schedule module:name`: it trains, and ranks compare it."""

from __future__ import annotations

from pathlib import Path

import pytest
from example import MODEL, train

OWN = """
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.schedules import family
from megatron_zbpp.schedules.construct.phases import phases


@family('mine')
def mine(num_ranks, num_microbatches):
    m = num_microbatches
    orders = (
        phases([rank], m, [({lead}, 'F', 'lead'), (m, 'F B W', 'steady')])
        for rank in range(num_ranks)
    )
    return Schedule.of('mine', Placement.loop(num_ranks), m, orders)
"""


def train_mine(module, folders, data, metrics):
    """Trains with the module of that name in this rank's folder; what it was told, if anything."""
    import sys
    from unittest import mock

    import torch.distributed as dist

    from megatron_zbpp.runtime.guard.agreement import DisagreementError

    argv = [*MODEL, '--num-layers', '4', '--pipeline-model-parallel-size', '2', '--train-iters']
    argv += ['2', '--log-interval', '1000', '--pipeline-watchdog-timeout', '60', '--data-path']
    argv += [str(data), '--pipeline-schedule', f'{module}:mine']
    with mock.patch.object(sys, 'path', [str(folders[dist.get_rank()]), *sys.path]):
        try:
            train(argv, metrics)
        except DisagreementError as error:
            return str(error)
    return None


@pytest.mark.parametrize(('module', 'leads'), [('alike', (1, 1)), ('apart', (1, 2))])
def test_own_family(ranks, data, tmp_path: Path, module: str, leads: tuple[int, int]):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, lead in zip(folders, leads, strict=True):
        folder.mkdir()
        (folder / f'own_{module}.py').write_text(OWN.format(lead=lead))
    metrics = tmp_path / 'metrics.jsonl'
    told = ranks(2).run(train_mine, f'own_{module}', folders, data, metrics, timeout=200)
    if module == 'alike':
        assert told == [None, None] and metrics.exists()
        return
    for message in told:
        assert 'what own_apart:mine makes: mine (' in message and 'on rank 1' in message
    assert not metrics.exists()
