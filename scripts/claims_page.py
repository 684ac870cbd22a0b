"""Writes the tables and lists that come from docs/claims.csv into the pages that have them.

python scripts/claims_page.py           # writes
python scripts/claims_page.py --check   # names the pages that differ, and fails

A row is a claim, the tests that show it on a CPU and under emulated rules, the result of a GPU, and
what limits it. The evidence (docs/results/README.md) has all but the limits, the limits
(docs/limits.md) have those. In a page the lines between `<!-- claims: NAME -->` and
`<!-- end of claims -->` are printed.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / 'docs'
CLAIMS = DOCS / 'claims.csv'
END = '<!-- end of claims -->'


class Claim(NamedTuple):
    """A row of the table; what is empty is not shown, or has no limit."""

    claim: str
    cpu: str
    emulated: str
    gpu: str
    limit: str


def claims(path: Path | None = None) -> list[Claim]:
    """Read the table; raise ValueError for a row without a claim or with other columns."""
    path = path or CLAIMS
    with path.open(newline='') as file:
        head, *rows = csv.reader(file)
    if tuple(head) != Claim._fields:
        raise ValueError(f'{path} has columns {head}: give {list(Claim._fields)}')
    for number, row in enumerate(rows, 2):
        if len(row) != len(head) or not row[0]:
            raise ValueError(f'row {number} of {path} is {row}: give a claim and its 4 cells')
    return [Claim(*row) for row in rows]


def evidence(rows: list[Claim]) -> str:
    """Table of what shows each claim."""
    lines = ['| capability | on the CPU | under emulated rules | on a GPU |', '|---|---|---|---|']
    lines += ['| ' + ' | '.join(row[:4]) + ' |' for row in rows]
    return '\n'.join(lines).replace('|  ', '| ')


def limits(rows: list[Claim]) -> str:
    """List of the limits."""
    return '\n'.join(f'- {row.limit}' for row in rows if row.limit)


PARTS = {
    'evidence': (DOCS / 'results' / 'README.md', evidence),
    'limits': (DOCS / 'limits.md', limits),
}


def printed(name: str) -> tuple[Path, str]:
    """Page of a part, and its text with the part printed anew."""
    path, part = PARTS[name]
    before, start, rest = path.read_text().partition(f'<!-- claims: {name} -->\n')
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f'{path} has no lines between "<!-- claims: {name} -->" and "{END}"')
    return path, f'{before}{start}\n{part(claims())}\n\n{end}{after}'


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        '--check', action='store_true', help='write nothing; fail if a page differs'
    )
    check = parser.parse_args(argv).check
    status = 0
    for path, text in map(printed, PARTS):
        if text != path.read_text():
            print(f'{path}: differs from {CLAIMS.name}' if check else f'{path}: written')
            status = int(check)
            if not check:
                path.write_text(text)
    return status


if __name__ == '__main__':
    sys.exit(main())
