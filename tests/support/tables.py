"""Tables of text: heads, and below each its rows; lines that begin with # are comments."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / 'megatron'


def blocks(file: Path) -> list[tuple[str, list[str]]]:
    """Return heads and the lines below, each joined with those that go on with it."""
    text = re.sub(r'^#.*\n', '', file.read_text(), flags=re.M).replace('\n      ', ' ')
    found = [block.splitlines() for block in re.split(r'\n+(?=\S)', text.strip())]
    return [(head, [line.strip() for line in lines]) for head, *lines in found]


def rows_of(file: str, head: str) -> list[tuple[str, ...]]:
    """Return the cells of each row below a head; ` | ` is between cells."""
    return [tuple(line.split(' | ')) for line in dict(blocks(FOLDER / file))[head]]
