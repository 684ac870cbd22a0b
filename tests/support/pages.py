"""What the README and the pages in docs/ tell to type: commands, and files that they use."""

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

README = ROOT / 'README.md'
PAGES = (README, *sorted((ROOT / 'docs').rglob('*.md')))
_FENCE = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```', re.M | re.S)


class Block(NamedTuple):
    """A block of code of a page; `title` is the name of the file that it is."""

    page: Path
    language: str
    title: str
    text: str


class Command(NamedTuple):
    page: Path
    line: str


def blocks() -> list[Block]:
    return [Block(page, *found) for page in PAGES for found in _FENCE.findall(page.read_text())]


def lines(page: Path) -> list[str]:
    texts = [block.text for block in blocks() if (block.page, block.language) == (page, 'bash')]
    return [command for text in texts for command in _commands(text)]


def _commands(text: str) -> list[str]:
    typed = text.replace('\\\n', ' ').splitlines()
    return [command for line in typed if (command := ' '.join(line.partition(' #')[0].split()))]


def printed() -> list[tuple[Command, str]]:
    """Returns (command, text) of each block `output`: lines that the command before it prints."""
    every = blocks()
    return [
        (Command(block.page, _commands(before.text)[-1]), block.text)
        for before, block in pairwise(every)
        if block.language == 'output'
    ]


def commands() -> list[Command]:
    """Returns every command of all pages, once: of the first page that has it."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for line in lines(page):
            found.setdefault(line, page)
    return [Command(page, line) for line, page in found.items()]


def section(page: Path, heading: str) -> str:
    """Returns what stands below a heading `## ...` of a page, up to the next one."""
    return page.read_text().partition(f'\n{heading}\n')[2].partition('\n## ')[0]


def files(page: Path) -> dict[str, str]:
    return {block.title: block.text for block in blocks() if block.page == page and block.title}
