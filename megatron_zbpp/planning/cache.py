"""Plans on disk, by what they were made from: the same question is planned once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path


def key(inputs: dict) -> str:
    """A hash of plain data: equal inputs, equal key."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(folder: Path, name: str) -> dict | None:
    """What `save` left under that name; None if there is nothing.

    Raises:
        ValueError: the file is damaged; the message names it and the cure.
    """
    path = folder / f'{name}.json'
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f'{path} is not a plan that was saved here: delete it ({error})') from error


def save(folder: Path, name: str, data: dict) -> None:
    """Writes `data` so that readers at the same time see all of it or nothing.

    Raises:
        ValueError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile('w', dir=folder, delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, folder / f'{name}.json')
    except OSError as error:
        raise ValueError(f'cannot keep plans in {folder}: {error}; give another folder') from error
