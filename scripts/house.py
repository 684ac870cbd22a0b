"""Counts the figures of the house: how much code there is, and who knows of what.

python scripts/house.py

Prints each figure beside its ceiling, above which a test fails. Lower the ceiling of a figure that
falls.
The first figure is counted where megatron-core is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'megatron_zbpp'
_TECHNIQUES = ('offload', 'recompute', 'evict')
_IMPORTED = """
import sys
from megatron_zbpp.emulation import cpu
cpu.install()
import megatron_zbpp
megatron_zbpp.enable('zb-h1')
files = {
    vars(module).get('__file__')
    for name, module in [*sys.modules.items()]
    if name.startswith('megatron_zbpp') and 'emulation' not in name  # which a GPU does not need
}
print(sum(len(open(file).read().splitlines()) for file in files if file))
"""


class Figure(NamedTuple):
    """A figure of the house.

    Attributes:
        name: what is counted.
        count: counts it.
        ceiling: most that is allowed.
    """

    name: str
    count: Callable[[], int]
    ceiling: int


def sources() -> Iterator[Path]:
    """Yield the files of the package."""
    return PACKAGE.rglob('*.py')


def package_lines() -> int:
    """Count the lines of the package."""
    return sum(len(file.read_text().splitlines()) for file in sources())


def imported_lines() -> int:
    """Count the lines of the package that `enable('zb-h1')` imports."""
    command = [sys.executable, '-W', 'ignore', '-c', _IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split()[-1])


def technique_files() -> int:
    """Count the files outside `techniques/` whose code names offload, recomputation or eviction."""
    return sum(
        any(word in name.lower() for name in _names(file) for word in _TECHNIQUES)
        for file in sources()
        if 'techniques' not in file.parts
    )


def riddles() -> int:
    """Count the docstrings that begin with "What" or "Whether" instead of a verb or a noun."""
    return sum(text.startswith(('What ', 'Whether ')) for text in _docstrings())


def first_route_readers() -> int:
    """Count the reads of `placement.first_route` outside `ir`, where two routes go unnoticed."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr == 'first_route'
        and getattr(node.value, 'attr', getattr(node.value, 'id', '')) == 'placement'
        for file in sources()
        if 'ir' not in file.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(file.read_text()))
    )


def _names(file: Path) -> Iterator[str]:
    """Yield the identifiers of a file; comments and strings are not looked at."""
    within = 0  # formatted strings: of tokens from Python 3.12 on
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        kind = tokenize.tok_name[token.type]
        within += (kind == 'FSTRING_START') - (kind == 'FSTRING_END')
        if token.type == tokenize.NAME and not within:
            yield token.string


def _docstrings() -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


FIGURES = (
    Figure("lines that enable('zb-h1') imports", imported_lines, 19_547),
    Figure('lines of the package', package_lines, 54_014),
    Figure('files outside techniques/ that name one in code', technique_files, 17),
    Figure('reads of placement.first_route outside ir', first_route_readers, 0),
    Figure('docstrings that begin with What or Whether', riddles, 0),
)


def main() -> None:
    """Print the table."""
    has_megatron = importlib.util.find_spec('megatron') is not None
    print(f'{"figure":<50} {"now":>8} {"ceiling":>8}')
    for figure in FIGURES:
        counted = figure.count is not imported_lines or has_megatron
        print(f'{figure.name:<50} {figure.count() if counted else "-":>8} {figure.ceiling:>8}')


if __name__ == '__main__':
    main()
