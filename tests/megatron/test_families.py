"""Every schedule of the library trains as Megatron's own 1F1B does, to the bit."""

from __future__ import annotations

import pytest
from example import run
from grids import grid
from supported import supports

from megatron_zbpp.ir.formats import to_torch_csv
from megatron_zbpp.schedules import FAMILIES, build

NO_CLIPPING = 1e9
CHUNKS = {'interleaved': 3, 'zb-interleaved': 3, 'hanayo': 4, 'gis': 3}  # beside the default


def common(data, p, m):
    """Layers for up to four chunks a rank."""
    flags = ['--pipeline-model-parallel-size', p, '--num-layers', 4 * p, '--data-path', data]
    return [*flags, '--global-batch-size', m, '--train-iters', 2, '--clip-grad', NO_CLIPPING]


def assert_as_by_megatron(trained, ranks, common):
    expected = run(ranks, *common, '--pipeline-schedule', 'megatron')
    assert trained.losses == expected.losses
    assert trained.parameters == expected.parameters
    assert trained.optimizer == expected.optimizer


@supports('GPT, fp32', '{family}')
@grid(family=tuple(family.name for family in FAMILIES), shape=((4, 7), (2, 3), (4, 2), (2, 6)))
def test_identical_to_megatron(ranks, data, family, shape):
    """With more microbatches than ranks and with fewer; with the usual chunks and with others."""
    p, m = shape
    for chunks in {None, CHUNKS.get(family)}:
        flags = ['--pipeline-schedule', family]
        flags += ['--num-virtual-stages-per-pipeline-rank', chunks] if chunks else []
        trained = run(ranks(p), *common(data, p, m), *flags)
        assert_as_by_megatron(trained, ranks(p), common(data, p, m))


@supports('a schedule from a file, {form}', 'zb-v')
@pytest.mark.parametrize('form', ['json', 'csv'])
def test_from_a_file(ranks, data, tmp_path, form):
    schedule = build('zb-v', 2, 3)
    path = tmp_path / f'schedule.{form}'
    path.write_text(schedule.to_json() if form == 'json' else to_torch_csv(schedule))
    trained = run(ranks(2), *common(data, 2, 3), '--pipeline-schedule-file', path)
    assert_as_by_megatron(trained, ranks(2), common(data, 2, 3))
