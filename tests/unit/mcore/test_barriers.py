"""What still makes ranks wait is named with its cure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.post_validation.barriers import barriers

LOOP, VEE = Placement.loop(4), Placement.v(4)


def named(placement, **settings):
    return [text.partition(':')[0] for text in barriers(SimpleNamespace(**settings), placement)]


def test_nothing():
    assert named(LOOP) == named(LOOP, log_interval=100, rerun_mode='disabled') == []


@pytest.mark.parametrize(
    'settings',
    [
        {'exit_duration_in_mins': 5},
        {'exit_signal_handler': True},
        {'log_params_norm': True},
        {'calculate_per_token_loss': True},
        {'num_experts': 8},
        {'log_interval': 1},
    ],
)
def test_each(settings):
    (name,) = settings
    assert [found.partition('=')[0] for found in named(VEE, **settings)] == [name]


def test_values_are_named():
    assert named(LOOP, rerun_mode='validate_results') == ['rerun_mode=validate_results']
    assert named(LOOP, timing_log_level=2, barrier_with_L1_time=True) == ['timing_log_level=2']
    assert named(LOOP, timing_log_level=2, barrier_with_L1_time=False) == []


def test_tied_embeddings_wait_where_two_ranks_hold_them():
    tied = {'untie_embeddings_and_output_weights': False}
    assert len(named(LOOP, **tied)) == 1 and named(VEE, **tied) == []
