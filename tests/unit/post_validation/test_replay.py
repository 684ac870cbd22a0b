"""The iterator gives what its source gives, whatever is wound back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.post_validation.data_iterators import ReplayIterator


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20))
def test_rewound_items_come_again(rounds):
    """Each round: reserve, mark, take, and perhaps take it all again."""
    replay, expected = ReplayIterator(iter(range(1000))), 0
    for reserved, taken, again in rounds:
        assert replay.reserve(reserved)
        replay.mark(keep=True)
        for _ in range(1 + again):
            assert [next(replay) for _ in range(taken)] == list(range(expected, expected + taken))
            assert replay.given == taken
            if again:
                replay.rewind()
                replay.mark(keep=False)
                again = False
        expected += taken
        replay.forget()


def test_the_end_of_the_source():
    replay = ReplayIterator(iter('ab'))
    assert not replay.reserve(3) and not replay.idle
    assert list(replay) == ['a', 'b'] and replay.idle
