"""What still makes ranks wait is named with its cure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.optimizer.barriers import barriers

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


TIMERS = {'timing_log_level': 2, 'barrier_with_L1_time': True}


@pytest.mark.parametrize(
    ('given', 'said', 'cured'),
    [
        ({'log_params_norm': True}, 'drop --log-params-norm', {'log_params_norm': False}),
        ({'rerun_mode': 'report'}, '--rerun-mode disabled', {'rerun_mode': 'disabled'}),
        ({'log_interval': 1}, '--log-interval 10 or more', {'log_interval': 10}),
        (TIMERS, '--no-barrier-with-level-1-timing', TIMERS | {'barrier_with_L1_time': False}),
        (
            {'untie_embeddings_and_output_weights': False},
            'untie them',
            {'untie_embeddings_and_output_weights': True},
        ),
    ],
    ids=str,
)
def test_what_is_named_is_done(given, said, cured):
    (found,) = barriers(SimpleNamespace(**given), LOOP)
    assert said in found
    assert not list(barriers(SimpleNamespace(**cured), LOOP))


@pytest.mark.parametrize(
    'given', [{'untie_embeddings_and_output_weights': False}, {'mtp_num_layers': 1}], ids=str
)
def test_a_schedule_with_a_v_is_taken(given):
    (found,) = barriers(SimpleNamespace(**given), LOOP)
    assert 'use a schedule with a V' in found
    assert not list(barriers(SimpleNamespace(**given), VEE))
