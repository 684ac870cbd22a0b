"""When receives are posted, from the setting to the programs: ranks that differ are told."""

from __future__ import annotations

import pytest

from megatron_zbpp.analysis.evaluation import evaluation
from megatron_zbpp.analysis.lowering import lower
from megatron_zbpp.analysis.program import BY_TAKER, LATE, RECEIVES
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings


@pytest.mark.parametrize('receives', RECEIVES)
def test_programs_are_those_that_were_asked_for(receives):
    found = Programs(Settings('zb-v', message_receives=receives)).lowered(4, 8, forward_only=False)
    assert found.programs == lower(found.schedule, receives)


def test_late_by_default_and_ranks_must_agree():
    keys = {
        receives: Programs(Settings('zb-v', message_receives=receives)).key for receives in RECEIVES
    }
    assert Programs(Settings('zb-v')).key == keys[LATE]
    assert len(set(keys.values())) == len(RECEIVES)


def test_where_shapes_vary_the_pass_that_takes_a_message_posts_its_receive():
    """Both kinds of programs are kept."""
    programs = Programs(Settings('zb-v'))
    late = programs.lowered(4, 8, forward_only=False)
    programs.varying = True
    found = programs.lowered(4, 8, forward_only=False)
    assert found.programs == lower(found.schedule, BY_TAKER) != late.programs
    evaluated = programs.lowered(4, 8, forward_only=True).schedule
    assert evaluated == evaluation(late.schedule)
    programs.varying = False
    assert programs.lowered(4, 8, forward_only=False) is late
