"""Parameters of tests in the words of the page of what is supported: see `words.txt`."""

import re
from pathlib import Path
from typing import Any

_TEXT = Path(__file__).with_suffix('.txt').read_text()
_WORDS = dict(re.findall(r'^(\w+ .+): (.+)$', _TEXT, re.M))  # by parameter and value


def worded(params: dict[str, Any]) -> dict[str, Any]:
    """Return a test's parameters by name, each in words where it has some."""
    return {
        name: _WORDS.get(f'{name} {value}', value) if isinstance(value, str | None) else value
        for name, value in params.items()
    }
