"""Numbers of papers and specifications, which lie in files beside the tests."""

import json
from pathlib import Path
from typing import Any


def published(test: str, name: str) -> list[list[Any]]:
    """Rows of the table whose heading begins with a name, in `published.json` beside a test."""
    tables = json.loads(Path(test).with_name('published.json').read_text())
    (found,) = (rows for heading, rows in tables.items() if heading.partition(':')[0] == name)
    return found
