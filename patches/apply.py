#!/usr/bin/env python3
"""Adds our two lines to pretrain_gpt.py of a Megatron-LM checkout, and takes them out again.

    patches/apply.py /path/to/Megatron-LM             # then pretrain_gpt.py has our flags
    patches/apply.py /path/to/Megatron-LM --check     # exit status 0: patched; 1: not patched
    patches/apply.py /path/to/Megatron-LM --revert

The same by hand, in the checkout: git apply --unidiff-zero /path/to/pretrain_gpt.patch
Exit status 2: it cannot be done; nothing has been changed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PATCH = Path(__file__).resolve().with_name('pretrain_gpt.patch')
LINES = [line[1:] for line in PATCH.read_text().splitlines() if line[0] == '+' != line[1]]
SCRIPT = 'pretrain_gpt.py'


class PatchError(Exception):
    """What is wrong with the checkout, and the cure."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('checkout', type=Path, help='folder of Megatron-LM')
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--check', action='store_true', help='say whether it is patched')
    what.add_argument('--revert', action='store_true', help='take the lines out again')
    args = parser.parse_args(argv)
    try:
        script = script_of(args.checkout)
        text = script.read_text()
        times = times_patched(text)
        if args.check and times < 2:
            print(f'{script}: {_state(text, times)}')
            return 1 - times
        script.write_text(reverted(text) if args.revert else applied(text))
    except (PatchError, OSError) as error:
        print(f'{parser.prog}: {args.checkout}: {error}', file=sys.stderr)
        return 2
    print(f'{script}: {"reverted" if args.revert else "patched"}')
    return 0


def script_of(checkout: Path) -> Path:
    """Return the script to patch.

    Raises:
        PatchError: the folder is none of Megatron-LM.
    """
    for part in (SCRIPT, 'megatron/training/arguments.py'):
        if not (checkout / part).is_file():
            raise PatchError(f'no checkout of Megatron-LM: it has no {part}; give its folder')
    return checkout / SCRIPT


def times_patched(text: str) -> int:
    """How often our lines stand in the script."""
    return text.splitlines().count(LINES[-1])


def applied(text: str) -> str:
    """Return the script with our lines.

    Raises:
        PatchError: it has them already, or they would not run first.
    """
    times = times_patched(text)
    if times == 1:
        raise PatchError('already applied; --revert takes it out')
    if times > 1:
        raise PatchError(f'patched {times} times; --revert takes out one at a time')
    patched = _git_apply(text)
    before = itertools.takewhile(lambda node: ast.unparse(node) != LINES[0], _parsed(patched).body)
    if not all(isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom)) for node in before):
        raise PatchError(
            'the patch does not apply: its lines would not run before all others, as this '
            f'{SCRIPT} begins otherwise; use python -m megatron_zbpp.launch instead'
        )
    return patched


def reverted(text: str) -> str:
    """Return the script without our lines; where they stand more than once, without the first.

    Raises:
        PatchError: it has none.
    """
    if not times_patched(text):
        raise PatchError('not patched: there is nothing to revert')
    return _git_apply(text, '--reverse')


def _state(text: str, times: int) -> str:
    if times:
        return 'patched'
    applied(text)  # raises where it cannot be
    return 'not patched; the patch applies'


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise PatchError(
            f'the patch does not apply: {SCRIPT} would be no Python: {error}'
        ) from None


def _git_apply(text: str, *options: str) -> str:
    """Return what git makes of `text`, in a folder of its own.

    In a folder that belongs to another repository git would look for the script at that one's top.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, SCRIPT)
        script.write_text(text)
        done = subprocess.run(
            ['git', 'apply', '--unidiff-zero', *options, str(PATCH)],
            cwd=folder,
            env=os.environ | {'GIT_CEILING_DIRECTORIES': str(Path(folder).resolve().parent)},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise PatchError(f'the patch does not apply: {done.stderr.strip()}')
        return script.read_text()


if __name__ == '__main__':
    sys.exit(main())
