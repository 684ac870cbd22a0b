"""What happens before what in logs of a recorded device, and what its communicators were given."""

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
    return Order(NAMES.__getitem__).read(sum(records, [Kind.ALLOCATE, BLOCK, 8, 0]))


def races(*records):
    return [str(race) for race in order(*records).races]


RECORD, WAIT = [Kind.RECORD, 1, EVENT], [Kind.WAIT, 2, EVENT]
BEHIND = 'second on stream 2 in no pass does not wait for first on stream 1 in no pass'
THIRD_BEHIND = BEHIND.replace('second', 'third')
ON_HOST = 'second on the host in no pass does not wait for first on stream 1 in no pass'
THIRD_WRITES = kernel(THIRD, 3, WRITES)
NOTED = [Kind.NOTE, PASS, LAUNCHER], [Kind.NOTE, NONE, LAUNCHER]


def between(*records):
    """What the second stream reads behind what the first one has written, and this between them."""
    return [kernel(FIRST, 1, WRITES), *records, kernel(SECOND, 2, READS)]


def on_host(*records):
    """As `between`, but the host reads."""
    return [kernel(FIRST, 1, WRITES), *records, kernel(SECOND, HOST, READS)]


@pytest.mark.parametrize(
    ('records', 'said'),
    [
        (between(), BEHIND),
        ([kernel(FIRST, 1, READS), kernel(SECOND, 2, WRITES)], BEHIND),
        ([kernel(FIRST, 1, WRITES), kernel(SECOND, 2, WRITES)], BEHIND),
        ([kernel(FIRST, 1, READS), kernel(SECOND, 2, READS)], ''),
        (between(RECORD, WAIT), ''),
        (between(RECORD, [Kind.HOST_EVENT, EVENT, SYNCHRONIZE, LAUNCHER]), ''),
        (between([Kind.HOST_STREAM, 1, SYNCHRONIZE, LAUNCHER]), ''),
        (between([Kind.HOST_DEVICE, SYNCHRONIZE, LAUNCHER]), ''),
        (between(RECORD), BEHIND),
        (between(WAIT), BEHIND),  # of an event that nobody has recorded
        (between([Kind.RECORD, 2, EVENT], WAIT), BEHIND),
        (between([Kind.HOST_STREAM, 2, SYNCHRONIZE, LAUNCHER]), BEHIND),
        (on_host(), ON_HOST),
        (on_host(RECORD), ON_HOST),
        (on_host(RECORD, WAIT), ON_HOST),  # that is a stream
        (on_host(RECORD, [Kind.HOST_EVENT, EVENT, QUERY, LAUNCHER]), ''),
        # what the host has done is before what it launches
        ([kernel(FIRST, HOST, WRITES), kernel(SECOND, 1, WRITES)], ''),
        # an event carries only what was before it
        ([RECORD, kernel(FIRST, 1, WRITES), WAIT, kernel(SECOND, 2, READS)], BEHIND),
        # a bucket is reduced while the gradients of the next are computed: bytes count, not blocks
        ([kernel(FIRST, 1, WRITES, 0, 4), kernel(SECOND, 2, WRITES, 4, 8)], ''),
        ([kernel(FIRST, 1, WRITES, 0, 4), kernel(SECOND, 2, WRITES, 3, 8)], BEHIND),
        # 1 before 2, 2 before 3: then 1 before 3
        (between(RECORD, [*WAIT, Kind.RECORD, 2, 2, Kind.WAIT, 3, 2], THIRD_WRITES)[:-1], ''),
        # a write of a part orders nothing about the rest
        (
            [kernel(FIRST, 1, WRITES), kernel(SECOND, 1, WRITES, 2, 4), kernel(THIRD, 2, READS, 4)],
            THIRD_BEHIND,
        ),
        # a race names its passes
        (
            [NOTED[0], kernel(FIRST, 1, WRITES), NOTED[1], kernel(SECOND, 2, READS)],
            BEHIND.replace('1 in no pass', '1 in 0W1'),
        ),
    ],
)
def test_what_orders(records, said):
    assert races(*records) == [said][: bool(said)]


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


@pytest.mark.parametrize('owner', [HOST, REGISTERED])
def test_page_locked_memory_is_not_of_the_device(owner):
    allocated = [Kind.ALLOCATE, 9, 100, owner, Kind.ALLOCATE, 10, 200, owner]
    found = order(allocated, [Kind.FREE, 9, LAUNCHER])
    assert (found.planned, found.page_locked, found.locked) == (8, [100, 200], {10: 200})


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
