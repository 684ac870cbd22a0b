"""Overlapped communication of experts in a program that does not make plans of its layers."""

from __future__ import annotations

import pytest
from models import Job, train
from ranks import RankError
from supported import refuses


@refuses('overlapped communication of experts', 'forward_step makes no plan', 'dualpipe-v')
def test_a_program_whose_forward_step_makes_no_plan(ranks, data):
    job = Job('hidden all-to-all', te=False, bf16=True, dp=2, ep=2)
    with pytest.raises(RankError, match='the forward_step function takes no return_schedule_plan'):
        ranks(4).run(train, job, job.argv('dualpipe-v', False, data))
