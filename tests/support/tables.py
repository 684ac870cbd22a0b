"""Tables of text, such as `refused_lines.txt`: rows below the name of what they are about."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / 'megatron'


def rows_of(file: str, name: str) -> list[tuple[str, ...]]:
    """Return the cells of each row below a name; ` | ` is between cells."""
    found = re.search(rf'^{re.escape(name)}\n((?:  .+\n)+)', (FOLDER / file).read_text(), re.M)
    return [tuple(line.strip().split(' | ')) for line in found[1].splitlines()]
