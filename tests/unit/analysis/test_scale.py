"""Building, checking and lowering take time that is linear in passes, not in ranks times passes.

Counted in calls of functions, which no other load on the machine changes.
"""

from __future__ import annotations

import cProfile
import pstats

import pytest

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir.graph import chain
from megatron_zbpp.schedules import build


def calls(name: str, p: int, m: int) -> float:
    """Calls for each pass, to build and to check a schedule."""
    chain.cache_clear()
    profile = cProfile.Profile()
    schedule = profile.runcall(build, name, p, m)
    profile.runcall(check, schedule)
    return pstats.Stats(profile).total_calls / sum(map(len, schedule.passes))


@pytest.mark.parametrize(
    ('name', 'small', 'large'),
    [
        ('1f1b', (8, 64), (8, 512)),
        ('1f1b', (8, 512), (64, 64)),
        ('zb-v', (4, 64), (4, 256)),
        ('zb-v', (4, 256), (16, 64)),
        ('zb-v', (32, 8), (128, 8)),  # fewer microbatches than ranks
        pytest.param('zb-v', (64, 16), (256, 16), marks=pytest.mark.full),
        ('interleaved', (4, 256), (32, 32)),
        ('dualpipe-v', (4, 256), (16, 64)),
        ('dualpipe', (4, 256), (16, 64)),
        ('chimera', (4, 256), (16, 64)),
        pytest.param('dualpipe', (8, 64), (64, 512), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_calls_for_each_pass_do_not_grow(name: str, small: tuple[int, int], large: tuple[int, int]):
    assert calls(name, *large) < 1.5 * calls(name, *small)
