"""Prints what was trained with what, as Markdown: this is docs/support.md.

It reads docs/support.csv, which tests write that pass:

    python -m pytest tests/megatron --record-support
    python scripts/support_page.py > docs/support.md
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_zbpp.schedules import build
from megatron_zbpp.schedules.registry import find

RECORDS = Path(__file__).parents[1] / 'docs' / 'support.csv'
HEAD = """# What is supported

Each cell is a test that passed with that release of megatron-core by that kind of schedule; on
Megatron's own layers, or on those of the release of Transformer Engine (TE) that is named, its
kernels emulated on a CPU. **=**: losses, parameters and optimizer state are those of Megatron's own
schedule, to the bit; **≈**: within a tolerance; **waits**: to the bit, and optimizer steps are not
validated later; **passes**: a test that is not ours; **—**: that release does not have it, which
the test found. Cells are empty of `--sft` with 0.16.1 alone: its data set is no mock, and with
conversations Megatron's own rotary embedding ends in an error, by its own schedules, too (`Boolean
value of Tensor with more than one value is ambiguous`).
0.20.0 is Megatron's main branch as of 22 August 2026.

Tests write the records (`docs/support.csv`), and a test fails where a record has no test any more:

```bash
python scripts/support_page.py
```

What is refused stands [below](#what-is-refused), what else to know in [limits](limits.md). Kinds of
schedules: one stage a rank (`1f1b`; with W passes `zb-h1`), a loop (`interleaved`; with W
`zb-interleaved`), a V (`1f1b-v`; with W `zb-v`).

## What trains
"""
ABSENT = 'absent'
SIGNS = {'bit-identical': '=', 'within tolerance': '≈', ABSENT: '—'}


class Record(NamedTuple):
    """A line of the records.

    Attributes:
        feature: what was trained with a schedule of ours.
        schedule: its name, with +post-validation where steps are validated later; 'any' where it
            does not matter.
        megatron: the release of megatron-core.
        te: the release of Transformer Engine, on whose layers; '' for Megatron's own.
        outcome: 'bit-identical', 'within tolerance', 'waits', 'passes', 'refused: ' and why, or
            'absent' where that release of Megatron has no such thing.
        test: file::function, from the repository's root.
    """

    feature: str
    schedule: str
    megatron: str
    te: str
    outcome: str
    test: str

    @property
    def release(self) -> str:
        return self.megatron.rpartition('.')[0]

    @property
    def refused(self) -> bool:
        return self.outcome.startswith('refused: ')


def read() -> list[Record]:
    """Return the records."""
    with RECORDS.open(newline='') as file:
        return [Record(*row) for row in csv.reader(file)][1:]


@cache
def kind(schedule: str) -> tuple[int, str]:
    """Return what schedules have in common that are alike for Megatron, and where it is listed."""
    name, _, later = schedule.partition('+')
    others = {'any': 'any', 'megatron': "Megatron's own", 'auto': 'planned by `auto`'}
    if name in others:
        place, words = 7 + list(others).index(name), others[name]
    else:
        family = find(name)
        made = build(name, 4, 8)
        place = 1 if family.default_chunks == 1 else 3 if made.placement.is_loop else 5
        words = {1: 'one stage a rank', 3: 'loop', 5: 'V'}[place]
        if any(each.kind == 'W' for rank in made.passes for each in rank):
            place, words = place + 1, f'{words}, W'
    return (place + 10, f'{words}, post-validation') if later else (place, words)


def page() -> str:
    """Return the page."""
    rows = read()
    return '\n'.join([HEAD, *_trained(rows), '', '## What is refused', '', *_refused(rows), ''])


def _trained(rows: list[Record]) -> list[str]:
    rows = [row for row in rows if not row.refused]
    releases = defaultdict(set)
    for row in rows:
        releases[row.release].add(row.megatron)
    heads = [', '.join(sorted(versions)) for _, versions in sorted(releases.items())]
    lines = [f'| what | schedules | {" | ".join(heads)} | shown by |']
    lines.append('|---' * (3 + len(heads)) + '|')
    for feature, of_feature in groupby(rows, lambda row: row.feature):
        kinds, tests = defaultdict(list), set()
        for row in of_feature:
            kinds[kind(row.schedule)].append(row)
            tests.add(row.test.partition('::')[0].rpartition('/')[2])
        for number, ((_, words), found) in enumerate(sorted(kinds.items())):
            cells = [cell([row for row in found if row.release == at]) for at in sorted(releases)]
            ends = (
                ('', '') if number else (feature, ', '.join(f'`{test}`' for test in sorted(tests)))
            )
            lines.append(f'| {ends[0]} | {words} | {" | ".join(cells)} | {ends[1]} |')
    return lines


def cell(rows: list[Record]) -> str:
    """Return the outcomes, each with the releases of Transformer Engine that it was seen with."""
    found = defaultdict(set)
    for row in rows:
        found[SIGNS.get(row.outcome, row.outcome)].add(row.te)
    if len(found) > 1:
        found.pop(SIGNS[ABSENT], None)
    return '; '.join(
        sign if sign == SIGNS[ABSENT] or engines == {''} else f'{sign} {_engines(engines)}'
        for sign, engines in sorted(found.items())
    )


def _engines(versions: set[str]) -> str:
    """Return with whose layers: those of some releases, or Megatron's own, too."""
    of_others = sorted(versions - {''}, key=lambda version: [*map(int, version.split('.'))])
    return ', '.join(['own'] * ('' in versions) + [f'TE {version}' for version in of_others])


def _refused(rows: list[Record]) -> list[str]:
    """Return a line for each refusal: by which releases."""
    refusals = defaultdict(set)
    for row in rows:
        if row.refused:
            why = row.outcome.removeprefix('refused: ')
            refusals[row.feature, kind(row.schedule)[1], why].add(row.megatron)
    lines = ['| what | schedules | why | megatron-core |', '|---|---|---|---|']
    for (feature, schedules, why), releases in sorted(refusals.items()):
        lines.append(f'| {feature} | {schedules} | {why} | {", ".join(sorted(releases))} |')
    return lines


if __name__ == '__main__':
    print(page(), end='')
