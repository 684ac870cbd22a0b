"""Files that people write: JSON, or YAML (through PyYAML, an extra), read as the same text."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

_YAML = ('.yaml', '.yml')


def json_of(path: str | Path) -> str:
    """Return the text of a file of JSON; of one of YAML, what it says, as JSON.

    Args:
        path: YAML where it ends in .yaml or .yml.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text.
        ValueError: it is no YAML, has a key twice, or what JSON cannot say, such as a date.
        ImportError: PyYAML is not installed; the message tells how.
    """
    text = Path(path).read_text(encoding='utf-8')
    if Path(path).suffix.lower() not in _YAML:
        return text
    try:
        yaml: Any = import_module('yaml')
    except ImportError as error:
        raise ImportError(f'{path}: YAML needs PyYAML: pip install pyyaml, or give JSON') from error
    try:
        _refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        return json.dumps(yaml.safe_load(text))
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        said = ' '.join(str(error).split())
        raise ValueError(f'no YAML of lists, numbers and names ({said})') from error


def _refuse_twice(node: Any) -> None:
    """Raise ValueError for a key that stands twice, of which YAML would take the last."""
    value = getattr(node, 'value', None)
    if not isinstance(value, list):
        return
    seen: set[str] = set()
    for entry in value:
        key, *rest = entry if isinstance(entry, tuple) else (None, entry)
        if key is not None and key.value in seen:
            raise ValueError(f'key {key.value!r} stands twice: leave one out')
        seen |= {key.value} if key is not None else set()
        for each in rest:
            _refuse_twice(each)
