"""Counts the figures of the house: how much code there is, and who knows of what.

python scripts/house.py

Prints each figure beside its ceiling, above which a test fails, and beside its target. A
ceiling only ever falls: a test compares it with those of earlier commits. Figures that need
megatron-core are counted where it is installed, one of them where its training loop is, too.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / 'megatron_zbpp'
TESTS = ROOT / 'tests'
DOCS = ROOT / 'docs'
# Words that identifiers and plain strings of a technique have.
TECHNIQUES = {
    'slices': ('slices', 'sliced'),
    'the vocabulary': ('vocab',),
    'two-way': ('two_way', 'mirror', 'replicas'),
    'updates': ('endless', 'asynchron', 'stash'),
    'offload': ('offload',),
    'recompute': ('recompute', 'recomputation'),
}
# Rooms that may name a technique: its own, the command line, the tables. Replicas of partitions
# are those of data-parallel training.
_OWN = ('techniques', 'cli')
_TABLES = ('rules', 'options', 'catalogue')
_NO_REPLICAS = ('partitioning',)
_DATED = re.compile(r'\d{4}-\d\d-\d\d')
# `emulation` is not needed by a GPU.
_FILES = """
def files():
    import sys
    named = [vars(module).get('__file__') for name, module in [*sys.modules.items()]
             if name.startswith('megatron_zbpp') and 'emulation' not in name]
    return {file for file in named if file}
"""
_ENABLED = f"""{_FILES}
from megatron_zbpp.emulation import cpu
cpu.install()
import megatron_zbpp
megatron_zbpp.enable('zb-h1')
print(sum(len(open(file).read().splitlines()) for file in files()))
"""
_LOOP = """
--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 1
--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --split 100,0,0 --num-workers 0
--eval-iters 0 --eval-interval 100 --pipeline-model-parallel-size 2 --pipeline-schedule zb-v
"""
_FIRST_PASS = f"""{_FILES}
import os, sys, torch
def count(module, inputs):
    print('files:', len(files()), flush=True)
    os._exit(0)
torch.nn.modules.module.register_module_forward_pre_hook(count)
sys.path.insert(0, 'tests/support')
import megatron_zbpp.launch
script = ['--cpu', 'tests/support/pretrain_script.py']
megatron_zbpp.launch.main([*script, *{_LOOP.split()}])
"""


class Figure(NamedTuple):
    """A figure of the house."""

    name: str
    count: Callable[[], int]
    ceiling: int  # most that is allowed today; of a floor the least
    target: int  # where it is to be in the end
    floor: bool = False  # more is better
    needs: str = ''  # module without which it cannot be counted

    @property
    def countable(self) -> bool:
        """Whether this environment has what the count needs."""
        return not self.needs or has(self.needs)

    def holds(self, number: int) -> bool:
        """Whether a count is within the ceiling, or at least at the floor."""
        return number >= self.ceiling if self.floor else number <= self.ceiling


def has(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


def sources() -> list[Path]:
    """Files of the package, sorted."""
    return sorted(PACKAGE.rglob('*.py'))


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _lines(files: list[Path]) -> list[int]:
    return [len(file.read_text().splitlines()) for file in files]


def package_lines() -> int:
    """Count the lines of the package."""
    return sum(_lines(sources()))


def package_files() -> int:
    """Count the files of the package."""
    return len(sources())


def median_lines() -> int:
    """Take the median of the lines of a file."""
    return int(statistics.median(_lines(sources())))


def mcore_lines() -> int:
    """Count the lines of the room that knows Megatron."""
    return sum(_lines(sorted((PACKAGE / 'mcore').rglob('*.py'))))


def test_lines() -> int:
    """Count the lines of all tests and their support."""
    return sum(_lines(sorted(TESTS.rglob('*.py'))))


def pages() -> int:
    """Count the pages of the documentation, without results that commands write by date."""
    return len([page for page in DOCS.rglob('*.md') if not _DATED.match(page.name)])


def imported_lines() -> int:
    """Count the lines of the package that `enable('zb-h1')` imports."""
    command = [sys.executable, '-W', 'ignore', '-c', _ENABLED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return int(done.stdout.split()[-1])


def first_pass_files() -> int:
    """Count the files imported before the first pass of NVIDIA's loop with `zb-v` on two ranks."""
    port = str(20_000 + os.getpid() % 10_000)
    ranks = {'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': 'localhost'}
    ranks |= {'MASTER_PORT': port, 'OMP_NUM_THREADS': '1'}

    def train(rank: str) -> str:
        environment = os.environ | ranks | {'RANK': rank, 'LOCAL_RANK': rank}
        command = [sys.executable, '-W', 'ignore', '-c', _FIRST_PASS]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        return done.stdout + done.stderr

    with ThreadPoolExecutor() as pool:
        printed = [*pool.map(train, '01')]  # the other rank waits for that one, and fails
    counts = [line.split()[1] for text in printed for line in text.splitlines() if 'files:' in line]
    if not counts:
        raise RuntimeError(f'no rank came to its first pass:\n{printed[0][-2000:]}')
    return int(counts[0])


def namespace_functions() -> int:
    """Count the functions of the package that take an `argparse.Namespace`."""
    return sum(
        any('Namespace' in ast.unparse(each.annotation) for each in _arguments(node))
        for node in _functions()
    )


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    every = node.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs]
    return [each for each in named if each.annotation is not None]


def _functions() -> Iterator[ast.FunctionDef]:
    for file in sources():
        yield from (node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef))


def tiny_functions() -> int:
    """Count the functions named once in the package whose bodies have at most three lines.

    Docstrings do not count, nor do methods that Python calls by their name.
    """
    named = Counter(name for file in sources() for name in _names(file))
    return sum(
        named[node.name] <= 2 and node.name[-2:] != '__' and 0 < _length(node) <= 3
        for node in _functions()
    )


def _length(node: ast.FunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def technique_files(technique: str) -> int:
    """Count the files outside techniques, command line and tables whose code names a technique."""
    others = _OWN + (_NO_REPLICAS if technique == 'two-way' else ())
    return sum(
        any(word in name for name in _words(file) for word in TECHNIQUES[technique])
        for file in sources()
        if not set(others) & set(file.relative_to(PACKAGE).parts)
        and not any(word in part for part in file.relative_to(PACKAGE).parts for word in _TABLES)
    )


def stage_classes() -> int:
    """Count the classes of stages: `ModelStage` and what is derived from it."""
    bases = {
        node.name: [getattr(base, 'attr', getattr(base, 'id', '')) for base in node.bases]
        for file in sources()
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.ClassDef)
    }

    def is_stage(name: str) -> bool:
        return name == 'ModelStage' or any(map(is_stage, bases.get(name, ())))

    return sum(map(is_stage, bases))


def riddles() -> int:
    """Count the docstrings that begin with a pronoun, or with a verb and a pronoun."""
    starts = 'What ', 'Whether ', 'Those ', 'Return what ', 'Return whether ', 'Return if '
    return sum(text.startswith(starts) for text in _docstrings())


def first_route_readers() -> int:
    """Count the reads of `placement.first_route` outside `ir`, where two routes go unnoticed."""
    return sum(
        isinstance(node, ast.Attribute)
        and node.attr == 'first_route'
        and getattr(node.value, 'attr', getattr(node.value, 'id', '')) == 'placement'
        for file in sources()
        if 'ir' not in file.relative_to(PACKAGE).parts
        for node in ast.walk(_tree(file))
    )


def _names(file: Path) -> Iterator[str]:
    """Yield the identifiers of a file; comments and strings are not looked at."""
    within = 0  # formatted strings: of tokens from Python 3.12 on
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        kind = tokenize.tok_name[token.type]
        within += (kind == 'FSTRING_START') - (kind == 'FSTRING_END')
        if token.type == tokenize.NAME and not within:
            yield token.string


def _words(file: Path) -> Iterator[str]:
    """Yield identifiers and strings that look like one, without docstrings."""
    for node in ast.walk(_tree(file)):
        for field in ('id', 'attr', 'name', 'arg', 'module', 'asname', 'value'):
            name = getattr(node, field, None)
            if isinstance(name, str) and name.replace('_', '').replace('-', '').isalnum():
                yield name.lower()


def _docstrings() -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for file in sources():
        for node in ast.walk(_tree(file)):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


FIGURES = (
    Figure('lines of the package', package_lines, 45_164, 45_000),
    Figure('files of the package', package_files, 217, 230),
    Figure('median lines of a file', median_lines, 212, 150, floor=True),
    Figure('lines of mcore', mcore_lines, 11_300, 11_500),
    Figure("lines that enable('zb-h1') imports", imported_lines, 12_782, 15_000, needs='megatron'),
    Figure(
        'files imported before the first pass of zb-v',
        first_pass_files,
        90,
        90,
        needs='megatron.training',
    ),
    Figure('functions that take a Namespace', namespace_functions, 3, 20),
    *(
        Figure(f'files that name {name} in code', partial(technique_files, name), now, target)
        for name, now, target in (
            ('slices', 22, 22),
            ('the vocabulary', 9, 15),
            ('two-way', 13, 15),
            ('updates', 11, 15),
            ('offload', 11, 15),
            ('recompute', 13, 15),
        )
    ),
    Figure('classes of model stages', stage_classes, 1, 1),
    Figure('functions named once, of at most 3 lines', tiny_functions, 80, 80),
    Figure('lines of tests', test_lines, 46_933, 45_000),
    Figure('pages of docs', pages, 25, 25),
    Figure('reads of placement.first_route outside ir', first_route_readers, 0, 0),
    Figure('docstrings that begin with a pronoun', riddles, 0, 0),
)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.split('\n')[0]).parse_args()
    print(f'{"figure":<50} {"now":>8} {"ceiling":>8} {"target":>8}')
    for figure in FIGURES:
        number = figure.count() if figure.countable else '-'
        print(f'{figure.name:<50} {number:>8} {figure.ceiling:>8} {figure.target:>8}')


if __name__ == '__main__':
    main()
