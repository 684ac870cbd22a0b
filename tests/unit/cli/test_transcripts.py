"""What `zbpp` prints and refuses, word for word: it changes on purpose only.

Each heading of `transcripts.txt` begins a session in a folder of its own, beside what is `recorded`
of tests/unit/partitioning. Behind what is printed
come lines of stderr with a !, and the exit code if it is not 0. After an intended change write the
file anew, read what differs as a user would, and say why in the commit:

    PYTHONPATH=tests/support python tests/unit/cli/test_transcripts.py
"""

import codecs
import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from own_families import only_own

from megatron_zbpp.cli import main

FILE = Path(__file__).with_name('transcripts.txt')
RECORDED = Path(__file__).parents[1] / 'partitioning' / 'recorded'


def sessions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in re.split(r'^## ', FILE.read_text(), flags=re.M)[1:]:
        heading, *lines = part.rstrip('\n').split('\n')
        found[heading] = lines
    return found


def printed(line: str) -> Iterator[str]:
    """Yield what a command prints; `printf` writes a file, and `> /dev/null` leaves only errors."""
    command, *words = shlex.split(line)
    if command == 'printf':
        Path(words[2]).write_bytes(codecs.escape_decode(words[0].encode())[0])
        return
    silent = words[-2:] == ['>', '/dev/null']
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(words[:-2] if silent else words)
        except SystemExit as end:  # argparse's own way out
            code = end.code
    yield from [] if silent else out.getvalue().splitlines()
    # releases of Python quote choices in different ways
    choices = re.compile(r'(?<=\(choose from )[^)]*')
    told = choices.sub(lambda found: found[0].replace("'", ''), errors.getvalue())
    yield from (f'! {line}' for line in told.splitlines())
    if code:
        yield f'[{code}]'


def transcript(lines: list[str]) -> list[str]:
    """Run the commands of a session in a folder of its own; return them with what they print."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path('recorded').symlink_to(RECORDED)
        try:
            with patch.dict(os.environ, {'XDG_CACHE_HOME': folder, 'COLUMNS': '80'}), only_own():
                commands = [line for line in lines if line.startswith('$ ')]
                return [each for line in commands for each in (line, *printed(line[2:]))]
        finally:
            os.chdir(before)


@pytest.mark.parametrize('heading', sessions())
def test_transcripts_stay(heading):
    lines = sessions()[heading]
    assert transcript(lines) == lines


if __name__ == '__main__':
    made = {heading: transcript(lines) for heading, lines in sessions().items()}
    parts = ('\n'.join([f'## {heading}', *lines, '']) for heading, lines in made.items())
    FILE.write_text('\n'.join(parts))
