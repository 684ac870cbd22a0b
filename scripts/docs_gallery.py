"""Makes the gallery of schedules and the planner page while mkdocs builds the site.

python scripts/docs_gallery.py

That writes docs/schedules.md, the gallery of a checkout, which is drawn with letters where the site
has pictures. A test holds that it is what the registry gives. mkdocs calls `on_files`; the rest
needs nothing of mkdocs.
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
from megatron_zbpp.render.text import timeline_text
from megatron_zbpp.schedules import Family, own_families
from megatron_zbpp.schedules.registry import MORE, PAPERS, RECOMMENDED, TIERS
from megatron_zbpp.techniques.updates.versions import steady_state

RANKS, MICROBATCHES = 4, 8
PLANNER = 'pages/planner.html'  # where planning.md links to
PAGE = Path(__file__).parents[1] / 'docs' / 'schedules.md'
_WIDTH = 132  # characters of a line of a drawing
_FAMILIES = own_families(every=True)
_EXAMPLE = re.compile(r'^ *>>> .*(?:\n(?! *$).*)*', re.M)
_INTRODUCTION = f"""# Gallery of schedules

Every schedule that the registry knows, drawn for p = {RANKS} ranks and m = {MICROBATCHES}
microbatches with F = B = W = 1: each rank's passes{{beside}}.
*Window*: from the first to the last pass of a rank, which counts with
[post-validation](post-validation.md); *makespan*: of all ranks. *Bubble* is the share of
the longest window in which the busiest rank idles; *idle GPU time* the share of all ranks' makespan
that is lost. *Memory* is in activations of one microbatch on a full rank. In formulas v is the
number of chunks a rank, n that of slices of a sequence, 4 here: `3F1.2` is slice 2 of microbatch
1. S and T, of the output
layer on all ranks, take no time here. [Asynchronous](asynchronous.md) schedules
never drain: of those the bubble is that of a call in the middle, a line marks a step, and shades
tell versions of the weights.

Other numbers: `zbpp show --schedule NAME --pp P --microbatches M`, or `zbpp compare`.

"""
_HEADS = '| schedule | bubble | idle GPU time | peak memory |\n|---|---|---|---|\n'
_TIERS = {
    RECOMMENDED: 'Recommended: for most pipelines one of these {} is the best',
    MORE: 'For a particular need: {} more',
    PAPERS: 'From papers, to compare: {} more',
}

_BESIDE = {
    True: ', and below them the activations that it holds',
    False: ', in letters. `./scripts/docs.sh` builds a site with pictures',
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
    """Return the page: a table of all families, and a section for each.

    Args:
        with_pictures: for the site; else drawn with letters.
    """
    section = _section if with_pictures else _drawn
    introduction = _INTRODUCTION.format(beside=_BESIDE[with_pictures])
    return introduction + ''.join(map(_table, TIERS)) + '\n'.join(map(section, _FAMILIES))


def _table(tier: str) -> str:
    """Return the table of the families of a tier."""
    families = [family for family in _FAMILIES if family.tier == tier]
    rows = (
        f'| [`{each.name}`](#{each.name}) | {" | ".join(_facts(each))} |\n' for each in families
    )
    return f'{_TIERS[tier].format(len(families))}:\n\n{_HEADS}{"".join(rows)}\n'


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


def _drawn(family: Family) -> str:
    """Return the section of a family, drawn with letters."""
    drawing = timeline_text(_case(family)[0], _WIDTH)
    return _with_drawing(family, f'## {family.name}', f'```text\n{drawing}\n```', '')


def _section(family: Family) -> str:
    """Return the section of a family, with its picture and the words of its generator."""
    words = re.split(r'^(?:Args|Returns|Raises):', inspect.getdoc(family.generate), flags=re.M)[0]
    heading = f'## {family.name} {{ #{family.name} }}'
    picture = f'![{family.name}](pictures/schedules/{family.name}.svg)'
    return _with_drawing(family, heading, picture, f'\n{fenced(words).rstrip()}\n')


def _with_drawing(family: Family, heading: str, drawing: str, words: str) -> str:
    others = ', '.join(f'`{alias}`' for alias in family.aliases)
    aliases = f'\n\nAlso called {others}.' if others else ''
    return f"""{heading}

{family.summary[0].upper()}{family.summary[1:]}. When: {family.when}{aliases}

| bubble | peak memory | source |
|---|---|---|
| {family.bubble} | {family.memory} | {family.source} |

{drawing}
{words}"""


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
