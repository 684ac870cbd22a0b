"""Microbatches of other lengths each: to the bit as by Megatron's own schedule."""

from __future__ import annotations

from grids import grid
from models import Job, check
from supported import supports


@supports('microbatches of any length (`variable_seq_lengths`)')
@grid(
    schedule=('zb-v', 'zb-h1', 'interleaved', '1f1b', 'dualpipe-v', 'zb-2p+post-validation'),
    pp=(4, 2),
    dp=(1, 1, 1, 1, 2),
)
def test_identical_to_megatron(ranks, data, schedule, pp, dp):
    check(ranks, data, schedule, Job('lengths', te=False, pp=pp, dp=dp))
