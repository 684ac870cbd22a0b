"""Writes the table in docs/flags.md from the options: a test holds that it is what they give.

python scripts/flags_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_zbpp.launch.flags import FLAGS
from megatron_zbpp.mcore.options import Option

PAGE = Path(__file__).parents[1] / 'docs' / 'flags.md'
HEAD = '| flag | meaning |\n|---|---|\n'
_TABLE = re.compile(re.escape(HEAD) + r'(\|.*\n)*')


def row(flag: Option) -> str:
    """Return the row of a flag."""
    name = f'{flag.name} {flag.unit}'.rstrip().replace('|', r'\|')
    default = flag.shown_default and f' Default: {flag.shown_default}.'
    page = flag.page and f' See {flag.page}.'
    return f'| `{name}` | {flag.text}{default}{page} |\n'


def page() -> str:
    """Return the page with its table as the options give it."""
    table = HEAD + ''.join(map(row, FLAGS))
    return _TABLE.sub(lambda _: table, PAGE.read_text())


if __name__ == '__main__':
    PAGE.write_text(page())
