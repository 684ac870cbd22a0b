"""Views of one iterator, which chunks keep from iteration to iteration."""

from __future__ import annotations

import itertools
import weakref

import pytest

from megatron_zbpp.post_validation.data_iterators import SharedIterators


def test_each_chunk_reads_all_in_order():
    views, source = SharedIterators(), itertools.count()
    first, second = views.of(source, 2)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    assert [next(second) for _ in range(3)] == [0, 1, 2]
    assert views.of(source, 2) == [first, second]
    assert next(first) == 3, 'run ahead, before the iteration begins'
    assert views.of(source, 2) == [first, second]
    assert [next(second), next(first), next(second)] == [3, 4, 4]


def test_what_all_have_read_is_forgotten():
    class Item:
        pass

    views, source = SharedIterators(), (Item() for _ in range(9))
    first, second, idle = views.of(source, 3)
    seen = [weakref.ref(next(first)) for _ in range(4)]
    assert [next(second) for _ in range(2)] == [each() for each in seen[:2]]
    views.of(source, 3)
    assert [each() is None for each in seen] == [True, True, False, False]
    with pytest.raises(RuntimeError, match='leave out post_validation'):
        next(idle)


def test_the_source_ends_for_each():
    first, second = SharedIterators().of(iter([1]), 2)
    assert list(first) == list(second) == [1]


def test_where_there_is_no_data():
    assert SharedIterators().of(None, 2) == [None, None]


def test_other_sources_have_others():
    views = SharedIterators()
    one, other = iter([1, 2]), iter([3, 4])
    (first,) = views.of(one, 1)
    assert next(first) == 1
    assert [next(view) for view in views.of(other, 1)] == [3]
    assert next(first) == 2
    for _ in range(9):
        views.of(iter([0]), 1)
    assert views.of(one, 1) != [first], 'few are kept'
