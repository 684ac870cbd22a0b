"""The tape gives what its source gives, whatever is wound back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_zbpp.post_validation.replay import Tape


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20))
def test_rewound_items_come_again(rounds):
    """Each round: reserve, mark, take, and perhaps take it all again."""
    tape, expected = Tape(iter(range(1000))), 0
    for reserved, taken, again in rounds:
        assert tape.reserve(reserved)
        tape.mark(keep=True)
        for _ in range(1 + again):
            assert [next(tape) for _ in range(taken)] == list(range(expected, expected + taken))
            assert tape.given == taken
            if again:
                tape.rewind()
                tape.mark(keep=False)
                again = False
        expected += taken
        tape.forget()


def test_the_end_of_the_source():
    tape = Tape(iter('ab'))
    assert not tape.reserve(3) and not tape.idle
    assert list(tape) == ['a', 'b'] and tape.idle
