"""Models that do not have each layer once: one module that runs twice, pruned, other numbers."""

import pytest
from models import Job, train
from outcome import error_of
from rows import row, trains
from supported import refuses

pytestmark = pytest.mark.te
LAYERS = 4  # over ranks: two in each chunk of a V
WHY = 'a stage cannot be told from one that was built elsewhere'


test_identical_to_megatron = trains(
    'layers {change}',
    {'layers': LAYERS},
    row(
        '',
        ('zb-h1', 'zb-2p+post-validation', 'interleaved', 'zb-v'),
        lambda change, schedule, **_: change == 'run twice' or schedule != 'zb-v',
        **{'change': ('run twice', 'pruned', 'numbered from 11', 'run twice'), 'te': (False, True)},
        kernels={'fused': {'fused': True, 'bf16': True}, 'plain': {}},
    ),
    te=True,
)


@refuses('layers {change}', WHY, 'zb-v')
@pytest.mark.parametrize('change', ['pruned', 'numbered from 11'])
def test_refused_in_a_v(ranks, data, change):
    """By name, with a schedule that takes them: see above."""
    job = Job(layers=LAYERS, change=change, te=False)
    for found in ranks(2).run(error_of, train, job, job.argv('zb-v', False, data)):
        assert found.startswith('the layers of decoder.layers were not built where the schedule')
        assert 'such as zb-h1, for layers that are pruned or have other numbers' in found
