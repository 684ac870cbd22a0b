"""What happens before what in logs of a recorded device, and what its communicators were given."""

from __future__ import annotations

import pytest
from recorded.communicators import Operation, faults
from recorded.ordering import HOST, REGISTERED, Kind, Order

WRITES, READS = 1, 0
NAMES = ['first', 'second', 'third', 'synchronize', '0W1', '', 'event.query']
FIRST, SECOND, THIRD, SYNCHRONIZE, PASS, NONE, QUERY = range(len(NAMES))
BLOCK, EVENT = 7, 11
LAUNCHER = 0  # a thread


def kernel(name, stream, writes, begin=0, end=8, block=BLOCK):
    return [Kind.KERNEL, stream, LAUNCHER, name, 1, writes, block, begin, end]


def order(*records):
    allocated = [Kind.ALLOCATE, BLOCK, 8, 0]
    return Order(NAMES.__getitem__).read(sum(records, allocated))


def races(*records):
    return [str(race) for race in order(*records).races]


@pytest.mark.parametrize(
    ('first', 'second', 'found'),
    [(WRITES, READS, True), (READS, WRITES, True), (WRITES, WRITES, True), (READS, READS, False)],
)
def test_two_streams_that_nothing_orders(first, second, found):
    said = races(kernel(FIRST, 1, first), kernel(SECOND, 2, second))
    assert (
        said
        == ['second on stream 2 in no pass does not wait for first on stream 1 in no pass'][
            : int(found)
        ]
    )


@pytest.mark.parametrize(
    ('between', 'ordered'),
    [
        ([Kind.RECORD, 1, EVENT, Kind.WAIT, 2, EVENT], True),
        ([Kind.RECORD, 1, EVENT, Kind.HOST_EVENT, EVENT, SYNCHRONIZE, LAUNCHER], True),
        ([Kind.HOST_STREAM, 1, SYNCHRONIZE, LAUNCHER], True),
        ([Kind.HOST_DEVICE, SYNCHRONIZE, LAUNCHER], True),
        ([Kind.RECORD, 1, EVENT], False),
        ([Kind.WAIT, 2, EVENT], False),  # of an event that nobody has recorded
        ([Kind.RECORD, 2, EVENT, Kind.WAIT, 2, EVENT], False),
        ([Kind.HOST_STREAM, 2, SYNCHRONIZE, LAUNCHER], False),
    ],
)
def test_what_orders(between, ordered):
    assert (not races(kernel(FIRST, 1, WRITES), between, kernel(SECOND, 2, READS))) == ordered


@pytest.mark.parametrize(
    ('between', 'found'),
    [
        ([], 1),
        ([Kind.RECORD, 1, EVENT], 1),
        ([Kind.RECORD, 1, EVENT, Kind.WAIT, 2, EVENT], 1),  # that is a stream
        ([Kind.RECORD, 1, EVENT, Kind.HOST_EVENT, EVENT, QUERY, LAUNCHER], 0),
    ],
)
def test_the_host_uses_what_it_has_waited_for(between, found):
    said = races(kernel(FIRST, 1, WRITES), between, kernel(SECOND, HOST, READS))
    where = 'second on the host in no pass'
    assert said == [f'{where} does not wait for first on stream 1 in no pass'][:found]


def test_what_the_host_has_done_is_before_what_it_launches():
    assert races(kernel(FIRST, HOST, WRITES), kernel(SECOND, 1, WRITES)) == []


@pytest.mark.parametrize(('asked', 'waits'), [(SYNCHRONIZE, ['synchronize']), (QUERY, [])])
def test_a_query_is_no_wait(asked, waits):
    found = order([Kind.RECORD, 1, EVENT, Kind.HOST_EVENT, EVENT, asked, LAUNCHER])
    assert [wait.what for wait in found.waits] == waits


def test_an_event_carries_what_was_before_it_only():
    event = [Kind.RECORD, 1, EVENT, Kind.WAIT, 2, EVENT]
    said = races(event[:3], kernel(FIRST, 1, WRITES), event[3:], kernel(SECOND, 2, READS))
    assert len(said) == 1


def test_waits_add_up_over_streams():
    """1 before 2, 2 before 3: then 1 before 3."""
    records = [kernel(FIRST, 1, WRITES), [Kind.RECORD, 1, 1, Kind.WAIT, 2, 1]]
    records += [[Kind.RECORD, 2, 2, Kind.WAIT, 3, 2], kernel(THIRD, 3, WRITES)]
    assert races(*records) == []


@pytest.mark.parametrize(('begin', 'found'), [(4, 0), (3, 1)])
def test_bytes_count_and_not_blocks(begin, found):
    """A bucket is reduced while the gradients of the next are computed."""
    said = races(kernel(FIRST, 1, WRITES, 0, 4), kernel(SECOND, 2, WRITES, begin, 8))
    assert len(said) == found


def test_each_part_keeps_its_own_uses():
    """A write of a part orders nothing about the rest."""
    records = [kernel(FIRST, 1, WRITES, 0, 8), kernel(SECOND, 1, WRITES, 2, 4)]
    said = races(*records, kernel(THIRD, 2, READS, 4, 8))
    assert said == ['third on stream 2 in no pass does not wait for first on stream 1 in no pass']


def test_a_race_names_its_passes():
    noted = [Kind.NOTE, PASS, LAUNCHER], [Kind.NOTE, NONE, LAUNCHER]
    said = races(noted[0], kernel(FIRST, 1, WRITES), noted[1], kernel(SECOND, 2, READS))
    assert said == ['second on stream 2 in no pass does not wait for first on stream 1 in 0W1']


FREE = [Kind.FREE, BLOCK, LAUNCHER]


@pytest.mark.parametrize(
    ('before', 'after', 'found'),
    [
        ([], [], 1),
        ([Kind.RECORD_STREAM, BLOCK, 1], [], 0),
        ([Kind.RECORD_STREAM, BLOCK, 2], [], 1),
        ([Kind.RECORD, 1, EVENT, Kind.WAIT, 0, EVENT], [], 0),
        # nothing of its own stream gets the memory before that waits
        ([Kind.RECORD, 1, EVENT], [Kind.WAIT, 0, EVENT], 0),
    ],
)
def test_memory_that_is_freed(before, after, found):
    """Its own stream may have it at once, for whatever it runs next."""
    use = kernel(FIRST, 1, READS)
    said = races(use, before, FREE, after, kernel(SECOND, 0, WRITES, block=8))
    freed = 'memory is free for second on stream 0 in no pass'
    assert said == [f'{freed}, though first on stream 1 in no pass may use it still'][:found]


@pytest.mark.parametrize(
    ('looked', 'held'), [([], 24), ([Kind.HOST_STREAM, 1, SYNCHRONIZE, LAUNCHER], 16)]
)
def test_peak_bytes(looked, held):
    """What another stream has recorded comes back once the host knows that this is done."""
    recorded = [*kernel(FIRST, 1, READS), Kind.RECORD_STREAM, BLOCK, 1]
    again = [Kind.ALLOCATE, 8, 16, 0]
    found = order(recorded, FREE, looked, again)
    assert (found.planned, found.held) == (16, held)


@pytest.mark.parametrize('owner', [HOST, REGISTERED])
def test_page_locked_memory_is_not_of_the_device(owner):
    allocated = [Kind.ALLOCATE, 9, 100, owner, Kind.ALLOCATE, 10, 200, owner]
    found = order(allocated, [Kind.FREE, 9, LAUNCHER])
    assert (found.planned, found.page_locked, found.locked) == (8, [100, 200], {10: 200})


@pytest.mark.parametrize(
    ('owner', 'waited', 'found'),
    [
        (REGISTERED, [], 1),
        (REGISTERED, [Kind.HOST_STREAM, 1, SYNCHRONIZE, LAUNCHER], 0),
        (HOST, [], 0),  # torch's waits for its copies
    ],
)
def test_memory_of_the_host_that_is_freed(owner, waited, found):
    allocated, freed = [Kind.ALLOCATE, 9, 8, owner], [Kind.FREE, 9, LAUNCHER]
    said = races(allocated, kernel(FIRST, 1, WRITES, block=9), waited, freed)
    assert len(said) == found and all('free for unlock on the host' in each for each in said)


def operations(*names, thread=1, pair=(), nbytes=8, by_peer=()):
    return [Operation(('2', (0, 1), pair), name, nbytes, 0, thread, *by_peer) for name in names]


def all_to_all(sent, received):
    return operations('alltoall_base', nbytes=sum(sent) + sum(received), by_peer=(sent, received))


REDUCED = operations('allreduce', 'broadcast')
SENT = operations('message from 0 to 1', pair=(0, 1))


@pytest.mark.parametrize(
    ('first', 'second', 'said'),
    [
        (REDUCED + SENT, SENT + REDUCED, None),  # two communicators do not wait for each other
        (REDUCED, REDUCED[::-1], 'rank 1 launches other operations than rank 0'),
        (REDUCED, operations('allreduce', 'broadcast', nbytes=4), 'other operations than rank 0'),
        (all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (2, 4)), None),
        (all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (1, 4)), 'which expects (1,)'),
        (all_to_all((1, 2), (1, 3)), all_to_all((2, 4), (2, 4)), 'which expects (3,)'),
        (REDUCED, REDUCED[:1], 'rank 1 launches other operations than rank 0'),
        (REDUCED, [], 'rank 1 launches nothing'),
        (SENT, [], 'rank 1 launches nothing'),
        (SENT * 2, [*SENT, *operations(SENT[0].name, pair=(0, 1), thread=2)], 'from 2 threads'),
        (REDUCED, [*REDUCED[:1], *operations('broadcast', thread=2)], None),
    ],
)
def test_what_communicators_were_given(first, second, said):
    found = [*faults([first, second])]
    assert len(found) == (said is not None)
    assert said is None or found[0].endswith(said)
