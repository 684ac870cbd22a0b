"""Makes the gallery of schedules and the planner page while mkdocs builds the site.

python scripts/docs_gallery.py

That writes docs/schedules.md, the gallery of a checkout, which has no pictures. A test holds that
it is what the registry gives. mkdocs calls `on_files`; the rest needs nothing of mkdocs.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.render.planner_page import planner_page
from megatron_zbpp.render.svg import svg
from megatron_zbpp.schedules import Family, own_families
from megatron_zbpp.schedules.registry import MORE, PAPERS, RECOMMENDED, TIERS
from megatron_zbpp.techniques.updates.versions import steady_state

RANKS, MICROBATCHES = 4, 8
PLANNER = 'pages/planner.html'  # where planning.md links to
PAGE = Path(__file__).parents[1] / 'docs' / 'schedules.md'
_FAMILIES = own_families(every=True)
_EXAMPLE = re.compile(r'^ *>>> .*(?:\n(?! *$).*)*', re.M)
_INTRODUCTION = f"""# Gallery of schedules

Every schedule that the registry knows{{more}}. The tables are simulated for p = {RANKS} ranks and
m = {MICROBATCHES} microbatches with F = B = W = 1
([words of tables](architecture.md#words-of-tables)).
[Asynchronous](asynchronous.md) schedules never drain: their bubble is that of one call in the
middle. `zbpp show --schedule NAME --pp P --microbatches M` draws a schedule, `zbpp compare` prints
a table for other sizes.

"""
_HEADS = '| schedule | bubble | idle GPU time | peak memory |\n|---|---|---|---|\n'
_HEADS_WITH_WORDS = '| schedule | bubble | idle | peak | what, and when |\n|---|---|---|---|---|\n'
_TIERS = {
    RECOMMENDED: 'Recommended: for most pipelines one of these {} is the best',
    MORE: 'For a particular need: {} more',
    PAPERS: 'From papers, to compare: {} more',
}

_MORE = {
    True: """, with a picture: passes of each rank, and below them the activations that it holds
(`3F1.2` is slice 2 of microbatch 1; a line marks an optimizer step, shades tell versions of the
weights). In formulas v is the number of chunks of a rank, n that of slices of a sequence, 4 here; S
and T, of the output layer on all ranks, take no time""",
    False: """, and when to take it. `zbpp list --all` prints aliases, formulas of bubble and
memory, and sources; the site of `./scripts/docs.sh` has pictures""",
}


def on_files(files, config):
    """Add the page and its pictures to mkdocs' files."""
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path(PAGE.name))  # that of a checkout
    files.append(File.generated(config, PAGE.name, content=gallery()))
    for family in _FAMILIES:
        path = f'pictures/schedules/{family.name}.svg'
        files.append(File.generated(config, path, content=picture(family)))
    files.append(File.generated(config, PLANNER, content=planner()))
    return files


def gallery(with_pictures: bool = True) -> str:
    """Return the page: tables of all families, and with pictures a section for each.

    Args:
        with_pictures: for the site.
    """
    introduction = _INTRODUCTION.format(more=_MORE[with_pictures])
    tables = (_table(tier, with_pictures) for tier in TIERS)
    shown = _FAMILIES if with_pictures else ()
    return (introduction + ''.join(tables) + '\n'.join(map(_section, shown))).rstrip() + '\n'


def _table(tier: str, with_pictures: bool) -> str:
    """Return the table of the families of a tier; without pictures it has the words, too."""
    families = [family for family in _FAMILIES if family.tier == tier]
    rows = (_row(each) if with_pictures else _row_with_words(each) for each in families)
    heads = _HEADS if with_pictures else _HEADS_WITH_WORDS
    return f'{_TIERS[tier].format(len(families))}:\n\n{heads}{"".join(rows)}\n'


def _row(family: Family) -> str:
    return f'| [`{family.name}`](#{family.name}) | {" | ".join(_facts(family))} |\n'


def _row_with_words(family: Family) -> str:
    words = _words(family).partition(' When: to compare. ')[0]
    name = f'<a id="{family.name}"></a>`{family.name}`'
    return f'| {name} | {" | ".join(_facts(family))} | {words} |\n'


@functools.cache  # `serve` builds anew at each change
def planner() -> str:
    """Return the planner page, with the usual sizes."""
    return planner_page()


def picture(family: Family) -> str:
    """Return the family's schedule as SVG."""
    timeline, costs = _case(family)
    heading = f'p = {RANKS}, m = {MICROBATCHES}, F = B = W = 1; simulated'
    return svg({family.name: timeline}, {family.name: costs}, width=1100, heading=heading)


def fenced(docstring: str) -> str:
    """Return the text with a fence around each run of lines that begins with `>>>`."""
    return _EXAMPLE.sub(lambda found: f'```pycon\n{found[0]}\n```', docstring)


def _section(family: Family) -> str:
    """Return the section of a family, with its picture and the words of its generator."""
    words = re.split(r'^(?:Args|Returns|Raises):', inspect.getdoc(family.generate), flags=re.M)[0]
    heading = f'## {family.name} {{ #{family.name} }}'
    picture = f'![{family.name}](pictures/schedules/{family.name}.svg)'
    others = ', '.join(f'`{alias}`' for alias in family.aliases)
    aliases = f' Also called {others}.' if others else ''
    return f"""{heading}

{_words(family)}{aliases}

Bubble: {family.bubble}. Peak memory: {family.memory}. Source: {family.source}.

{picture}

{fenced(words).rstrip()}
"""


def _words(family: Family) -> str:
    return f'{family.summary[0].upper()}{family.summary[1:]}. When: {family.when}'


def _facts(family: Family) -> tuple[str, ...]:
    """Return the bubble, what all ranks idle, and the peak memory."""
    timeline, costs = _case(family)
    steady = steady_state(timeline)
    if steady is not None:
        held = f'{max(peak(timeline.schedule, costs)):g}'
        return f'{steady.bubble:.1%} (of a call)', '–', held  # noqa: RUF001
    shares = timeline.bubble, timeline.idle_all_ranks
    return *(f'{share:.1%}' for share in shares), f'{max(peak(timeline.schedule, costs)):g}'


def _case(family: Family):
    """Return the family's timeline with its own number of chunks, and the costs."""
    schedule = family.generate(RANKS, MICROBATCHES)
    costs = Costs.uniform(schedule.placement)
    return simulate(schedule, costs), costs


if __name__ == '__main__':
    PAGE.write_text(gallery(with_pictures=False))
