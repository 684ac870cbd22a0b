"""Who steps early."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.post_validation.protocol import EarlyStepPolicy, Prefix, is_clean

norms = st.floats(0, 1e6) | st.sampled_from([math.inf, math.nan])


@given(st.lists(norms, min_size=1, max_size=8), st.sampled_from([0.0, 1.0, 1e3]))
def test_ranks_ahead_are_the_first_ones(squares, clip_grad):
    """Nobody goes ahead behind one that does not."""
    prefix, went = Prefix(), []
    for square in squares:
        following = prefix.then(square, clip_grad)
        went.append(following.ahead > prefix.ahead)
        prefix = following
    assert went == sorted(went, reverse=True)
    assert prefix.ahead == sum(went)
    if all(went):
        assert is_clean(math.sqrt(sum(squares)), clip_grad) or clip_grad


@given(st.floats(0, 100, width=32), st.floats(0.01, 10))
def test_stands_as_megatron_clips(norm, clip_grad):
    assert is_clean(norm, clip_grad) == (not clip_grad / (norm + 1.0e-6) < 1.0)


@given(st.floats(0, width=32))
def test_a_norm_gives_its_sum_of_squares_back(total):
    """`updates` gets the root of a float32 and reduces the float32 itself."""
    import torch

    root = total**0.5
    assert torch.tensor([root * root], dtype=torch.float32).item() == total


def run(policy, outcomes):
    states = []
    for clean in outcomes:
        states.append(policy.engaged)
        policy.after(clean)
    return states


def test_engages_after_clean_steps_in_a_row():
    assert run(EarlyStepPolicy(3), [True, True, False, True, True, True, True]) == [False] * 6 + [
        True
    ]


def test_steps_back_when_clipping_is_frequent():
    policy = EarlyStepPolicy(2, window=4, tolerated=1)
    outcomes = [True, True, False, True, False, True, True, True]
    assert run(policy, outcomes) == [False] * 2 + [True] * 3 + [False] * 2 + [True]


def test_tolerates_rare_failures():
    policy = EarlyStepPolicy(1, window=4, tolerated=1)
    assert all(run(policy, [True] + [False, True, True, True] * 5)[1:])


def test_goes_on_while_no_rank_goes_ahead():
    """Steps that overflow on the first rank, whose state all ranks behind it know."""
    policy = EarlyStepPolicy(0, window=4, tolerated=1)
    for _ in range(20):
        policy.after(clean=False, early=False)
    assert policy.engaged, 'nothing was taken back'
    for _ in range(2):
        policy.after(clean=False, early=True)
    assert not policy.engaged


def test_ends_when_each_iteration_runs_again():
    policy = EarlyStepPolicy(1)
    policy.after(True)
    for redone in (True, True, False, True, True):
        policy.after_iteration(redone)
    assert policy.engaged, 'not three in a row'
    policy.after_iteration(True)
    assert policy.ended
    assert not any(run(policy, [True] * 20)), 'it does not begin again'
