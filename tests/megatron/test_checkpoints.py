"""Saved by one schedule, resumed by another: as if nothing had happened."""

from __future__ import annotations

import pytest
from example import run


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
@pytest.mark.parametrize(
    ('first', 'second'), [('1f1b', 'zb-v'), ('zb-v', '1f1b'), ('megatron', 'zb-v')]
)
def test_resume_with_another_schedule(ranks, data, tmp_path, first, second, precision):
    pool = ranks(2)
    common = ['--num-layers', 5, '--pipeline-model-parallel-size', 2, '--global-batch-size', 4]
    common += ['--data-path', data, '--clip-grad', 1e9, '--train-iters', 10]
    common += ['--bf16'] if precision == 'bf16' else []
    whole = run(pool, tmp_path, *common, '--pipeline-schedule', 'megatron')
    saving = ['--save', tmp_path / 'checkpoint', '--exit-interval', 6]
    before = run(pool, tmp_path, *common, '--pipeline-schedule', first, *saving)
    loading = ['--load', tmp_path / 'checkpoint']
    after = run(pool, tmp_path, *common, '--pipeline-schedule', second, *loading)
    assert len(before.losses) == 6 and len(after.losses) == 4
    assert before.losses + after.losses == whole.losses
    assert after.parameters == whole.parameters
    assert after.optimizer == whole.optimizer
