"""NVIDIA's own unit tests of its schedules pass with ours in Megatron's table. They need a checkout
of Megatron-LM: MEGATRON_LM names it."""

import ast
import json
import sys
from pathlib import Path

import pytest
from commands import run
from nvidia import CHECKOUT, release
from paths import SUPPORT
from supported import PASSES, supports

FILE = 'tests/unit_tests/pipeline_parallel/test_schedules.py'
# call what Megatron's own function is made of, or no function that runs passes
OF_ITS_OWN = ('test_schedule_enables_grad_sync_on_first_stage', 'test_get_pipeline_parallel_order')


def tests() -> list[str]:
    """The names of NVIDIA's tests in the checkout; none where there is none."""
    path = Path(CHECKOUT or '', FILE)
    if not CHECKOUT or not path.exists():
        return []
    tree = ast.parse(path.read_text())
    named = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in named if name.startswith('test_') and name not in OF_ITS_OWN]


def schedule(test: str) -> str:
    """Ours that does what the test is about."""
    chunks = test.endswith('interleaving') or 'with_interleaving' in test
    return 'whole_groups:interleaved' if chunks else '1f1b'


@pytest.fixture(scope='module')
def statuses() -> dict[str, list[int]]:
    """Exit codes of pytest on the ranks of each test."""
    pytest.importorskip('pytest_mock')
    wanted = [f'{FILE}::{test}={schedule(test)}' for test in tests()]
    done = run([sys.executable, SUPPORT / 'nvidia_unit_tests.py', CHECKOUT, *wanted], timeout=1500)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["tests/')]
    print(done.stdout, done.stderr)
    return {test.partition('::')[2]: codes for test, codes in found}


@pytest.mark.skipif(not tests(), reason='needs a checkout of Megatron-LM: MEGATRON_LM names it')
@pytest.mark.timeout(1800)
@supports("NVIDIA's own unit tests of its schedules", '1f1b interleaved', PASSES)
@pytest.mark.parametrize('test', tests() or ['none'])
def test_passes(statuses, test, record_property):
    record_property('megatron', release())
    assert statuses[test] == [0] * 8
