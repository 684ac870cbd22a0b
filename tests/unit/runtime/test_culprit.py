"""Who is blamed, from what ranks say of themselves."""

from megatron_zbpp.runtime.guard.culprit import RankStatus, find_culprit

ALL = {0, 1, 2, 3}


def test_through_others():
    """Rank 3 waits for 2, which waits for 1, which waits for 0, which is stopped."""
    said = {rank: RankStatus('F', (rank - 1,), 6.0) for rank in (1, 2, 3)}
    said[0] = RankStatus('1F4', (1,), 0.5)
    assert find_culprit(3, said, ALL - {0}, stalled=6.0) == (
        'culprit: global rank 0, which does not answer (its last word: 1F4); 1 waits for 0, '
        '2 waits for 1, 3 waits for 2'
    )


def test_who_stands_and_waits_for_nobody():
    said = {0: RankStatus('0B0', (1,), 6.0), 1: RankStatus('save', (), 5.5)}
    line = find_culprit(0, said, ALL, stalled=6.0)
    assert line == 'culprit: global rank 1, which stands for 6 s at save; 0 waits for 1'


def test_who_computes_is_not_to_blame():
    """Where a rank has died, others that live and have not come yet are not late."""
    said = {
        0: RankStatus('step', (1, 2)),
        1: RankStatus('1F0', (), 9.0),
        2: RankStatus('step', (0, 1)),
    }
    assert find_culprit(0, said, {0, 1}) == (
        'culprit: global rank 2, which does not answer (its last word: step); 0 waits for 2'
    )
    assert find_culprit(0, said, {0, 1, 2}).startswith('culprit: none found')


def test_who_ends_because_of_others_is_no_culprit():
    """Though it no longer answers."""
    said = {
        0: RankStatus('0B0', (1,)),
        1: RankStatus('1B0', (2,), ending=True),
        2: RankStatus('2F4', failure='RuntimeError: out of luck', ending=True),
    }
    assert find_culprit(0, said, {0}) == (
        'culprit: global rank 2, which failed at 2F4: RuntimeError: out of luck; 0 waits for 1, '
        '1 waits for 2'
    )


def test_two_at_once_and_one_that_never_spoke():
    said = {0: RankStatus('barrier', (1, 2, 3)), 1: RankStatus('1F0', over=True)}
    said[2] = RankStatus('barrier', (0, 1, 3), ending=True)
    line = find_culprit(0, said, {0})
    assert line.startswith(
        'culprit: global ranks 1, which has ended its training, and 3, which has never said'
    )


def test_there_and_back():
    statement = RankStatus('1F0', (1, 2), 1.5, 'RuntimeError: "x"\n', True)
    assert RankStatus.from_json(statement.to_json()) == statement
