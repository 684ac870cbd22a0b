"""The rank at fault where ranks wait for each other, found by each one's statement on itself.

>>> said = {0: Statement('0B0', (1,)), 1: Statement('1B0', (2,)), 2: Statement('2F4')}
>>> print(accuse(0, said, answering={0, 1}))
culprit: global rank 2, which does not answer (its last word: 2F4); 0 waits for 1, 1 waits for 2
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from math import inf

NOBODY = 'culprit: none found among those that are waited for'


@dataclass(frozen=True)
class Statement:
    """The statement of a rank about itself.

    Attributes:
        now: where it stands, for people.
        waits: global ranks that it waits for: any of them may be late; empty: for none.
        seconds: since its last step forward.
        failure: what it ends with by its own fault; empty: nothing.
        ending: whether it ends since others have failed.
        over: whether it has ended its training.
    """

    now: str
    waits: tuple[int, ...] = ()
    seconds: float = 0.0
    failure: str = ''
    ending: bool = False
    over: bool = False

    def to_json(self) -> str:
        """Return it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """Return what `to_json` wrote."""
        said = json.loads(text)
        return cls(**said | {'waits': tuple(said['waits'])})


def accuse(
    rank: int,
    said: Mapping[int, Statement],
    answering: Collection[int],
    stalled: float = inf,
) -> str:
    """Return one line: who keeps the others waiting, and who waits for whom.

    Args:
        rank: that asks: the search follows what it waits for, and what those wait for.
        said: the latest statement of each global rank that has made one.
        answering: ranks that have spoken since they were asked: they live.
        stalled: seconds that `rank` has waited: who stands still for as long, and waits for nobody,
            is to blame. Infinite where a rank is known to have died: others that live are not.
    """

    def guilt(one: int) -> str:
        if one not in said:
            return 'has never said where it is'
        own = said[one]
        if own.failure:
            return f'failed at {own.now}: {own.failure}'
        if own.over:
            return 'has ended its training'
        if own.ending:
            return ''
        if one not in answering:
            return f'does not answer (its last word: {own.now})'
        if not own.waits and own.seconds >= stalled / 2:
            return f'stands for {own.seconds:.0f} s at {own.now}'
        return ''

    found: dict[int, str] = {}
    to_ask = [rank]
    while to_ask:
        one = to_ask.pop(0)
        if one not in found:
            found[one] = guilt(one)
            to_ask += () if found[one] else said[one].waits
    guilty = {one: why for one, why in sorted(found.items()) if why}
    if not guilty:
        return NOBODY
    waiting = {one: set(said[one].waits) for one in sorted(found) if one not in guilty}
    pairs = [
        f'{one} waits for {", ".join(map(str, sorted(whom & set(guilty) or whom)))}'
        for one, whom in waiting.items()
        if whom
    ]
    facts = ', and '.join(f'{one}, which {why}' for one, why in guilty.items())
    line = f'culprit: global rank{"s" * (len(guilty) > 1)} {facts}'
    return f'{line}; {", ".join(pairs)}' if pairs else line
