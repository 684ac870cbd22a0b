"""Messages that refuse something, and what is done about them.

A row has a message and the cures that it names; `test_message_cures.py` tries each.
"""

from __future__ import annotations

from cures.of_calls import CALLS
from cures.of_flags import FLAGS
from cures.of_launch_lines import LINES
from cures.of_programs import PROGRAMS
from cures.of_recipes import RECIPES

TABLES = {
    'flags': FLAGS,
    'launch line': LINES,
    'program': PROGRAMS,
    'recipe': RECIPES,
    'call': CALLS,
}
ROWS = {f'{kind}: {name}': row for kind, rows in TABLES.items() for name, row in rows.items()}
