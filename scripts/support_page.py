"""Prints what was trained with what, as Markdown: this is docs/support.md.

It reads docs/support.csv, which tests write that pass:

    python -m pytest tests/megatron --record-support
    python scripts/support_page.py > docs/support.md
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_zbpp.schedules import build
from megatron_zbpp.schedules.registry import find

RECORDS = Path(__file__).parents[1] / 'docs' / 'support.csv'
HEAD = """# What is supported

This page is for who wants to know whether a model, a setting or a release trains with a schedule of
ours. Figures count features that a test trained with a schedule, by release of megatron-core.
[Details](#details) lists each feature by kind of schedule, [what is refused](#what-is-refused) the
refusals, [limits](limits.md) what else to know.

- **=** to the bit: losses, parameters and optimizer state are those of Megatron's own schedule
- **≈** within a tolerance
- **waits** to the bit, but optimizer steps are not validated later
- **passes** a test that is not ours
- **—** that release does not have it, as the test found

0.20.0 is Megatron's main branch as of 22 August 2026. 0.17 and 0.18 have no column: 0.17.1 and
0.18.2 were [trained by launch lines](getting-started.md#on-your-megatron-lm), not in these tests.
"""
DETAILS = """
## Details

*TE* is the release of Transformer Engine on whose layers it was trained, its kernels emulated on a
CPU; *own* are Megatron's own layers. Kinds of schedules: one stage a rank (`1f1b`; with W passes
`zb-h1`), a loop (`interleaved`; with W `zb-interleaved`), a V (`1f1b-v`; with W `zb-v`), two ways
(`chimera`; with W `dualpipe`). `--sft` has no entry for 0.16.1: its dataset cannot be mocked, and
Megatron's own run fails there (`Boolean value of Tensor with more than one value is ambiguous`).

Tests write the records (`docs/support.csv`); a test fails where a record has no test any more:

```bash
python scripts/support_page.py
```
"""
# pattern of the features of each topic; the first that matches counts
TOPICS = {
    'Activation offload, recomputation, partners': (
        'activation offload|offloading of|recompute|on a partner|order and actions'
    ),
    'Optimizer steps without waiting': 'validated later|Muon|policy and reference|after the step',
    'Communication overlapped with computation': 'overlapped communication|dispatch overlapped',
    'Mixture of experts': 'expert|MoE|DeepSeek|GPT-OSS',
    'Data, tensor and context parallelism': 'parallel',
    'Precision': 'fp16|FP8|bf16',
    'Checkpoints': 'checkpoint',
    'Lengths, batches and evaluation': 'length|batches|evaluation|sft|token|skipped|mask',
    'Hybrid, BERT, images, multi-token prediction': 'Hybrid|BERT|images|multi-token prediction',
    'Megatron-Bridge and adapters': 'Bridge|LoRA|frozen|adapters',
    'GPT, Llama, latent attention': 'GPT|Llama|MLA|dense|SwiGLU',
    'Schedules, layouts and programs': '',
}
ABSENT = 'absent'
SIGNS = {'bit-identical': '=', 'within tolerance': '≈', ABSENT: '—'}


class Record(NamedTuple):
    """A line of the records.

    Attributes:
        feature: what was trained with a schedule of ours.
        schedule: its name, with +post-validation where steps are validated later; 'any' where it
            does not matter.
        megatron: the release of megatron-core.
        te: the release of Transformer Engine, on whose layers; '' for Megatron's own.
        outcome: 'bit-identical', 'within tolerance', 'waits', 'passes', 'refused: ' and why, or
            'absent' where that release of Megatron has no such thing.
        test: file::function, from the repository's root.
    """

    feature: str
    schedule: str
    megatron: str
    te: str
    outcome: str
    test: str

    @property
    def release(self) -> str:
        return self.megatron.rpartition('.')[0]

    @property
    def refused(self) -> bool:
        return self.outcome.startswith('refused: ')


def read() -> list[Record]:
    """Return the records."""
    with RECORDS.open(newline='') as file:
        return [Record(*row) for row in csv.reader(file)][1:]


@cache
def kind(schedule: str) -> tuple[int, str]:
    """Return what schedules have in common that are alike for Megatron, and where it is listed."""
    name, _, later = schedule.partition('+')
    others = {'any': 'any', 'megatron': "Megatron's own", 'auto': 'planned by `auto`'}
    if name in others:
        place, words = 9 + list(others).index(name), others[name]
    else:
        family = find(name)
        made = build(name, 4, 8)
        place = 1 if family.default_chunks == 1 else 3 if made.placement.is_loop else 5
        place = place if family.num_routes == 1 else 7
        words = {1: 'one stage a rank', 3: 'loop', 5: 'V', 7: 'two ways'}[place]
        if any(each.kind == 'W' for rank in made.passes for each in rank):
            place, words = place + 1, f'{words}, W'
    return (place + 20, f'{words}, post-validation') if later else (place, words)


def page() -> str:
    """Return the page."""
    rows = read()
    shown = [row for row in rows if not row.refused]
    refused = ['', '## What is refused', '', *_refused(rows), '']
    return '\n'.join([HEAD, *_matrix(shown), DETAILS, *_details(shown), *refused])


def topic(feature: str) -> str:
    """Return the topic under which `feature` is listed."""
    return next(name for name, words in TOPICS.items() if re.search(words, feature))


def _by_topic(rows: list[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        found[topic(row.feature)].append(row)
    return {name: found[name] for name in TOPICS if name in found}


def _heads(rows: list[Record]) -> dict[str, str]:
    """Return the column of each release, by its first two numbers."""
    releases = defaultdict(set)
    for row in rows:
        releases[row.release].add(row.megatron)
    return {at: ', '.join(sorted(versions)) for at, versions in sorted(releases.items())}


def _matrix(rows: list[Record]) -> list[str]:
    """Return the table of topics and releases: how many features have which outcome."""
    heads = _heads(rows)
    lines = [f'| topic | {" | ".join(heads.values())} |', '|---' * (1 + len(heads)) + '|']
    for name, found in _by_topic(rows).items():
        cells = [_counts([row for row in found if row.release == at]) for at in heads]
        lines.append(f'| [{name}](#{_anchor(name)}) | {" | ".join(cells)} |')
    return lines


def _counts(rows: list[Record]) -> str:
    seen = {(row.outcome, row.feature, row.schedule) for row in rows}
    counts = Counter(SIGNS.get(outcome, outcome) for outcome, *_ in seen)
    return ', '.join(f'{sign} {count}' for sign, count in sorted(counts.items()))


def _anchor(name: str) -> str:
    return re.sub('[^a-z0-9]+', '-', name.lower())


def _details(rows: list[Record]) -> list[str]:
    """Return a folded table for each topic; a search of the page finds what is folded, too."""
    lines, heads = [], _heads(rows)
    for name, found in _by_topic(rows).items():
        features = len({row.feature for row in found})
        summary = f'{name}: {features} feature{"s" * (features != 1)}'
        lines += [f'<details id="{_anchor(name)}" markdown="1"><summary>{summary}</summary>', '']
        lines += [*_features(found, heads), '', '</details>', '']
    return lines[:-1]


def _features(rows: list[Record], heads: dict[str, str]) -> list[str]:
    """Return the table of features, a line for each kind of schedule."""
    lines = [f'| what | schedules | {" | ".join(heads.values())} | shown by |']
    lines.append('|---' * (3 + len(heads)) + '|')
    for feature, of_feature in groupby(rows, lambda row: row.feature):
        kinds, tests = defaultdict(list), set()
        for row in of_feature:
            kinds[kind(row.schedule)].append(row)
            tests.add(row.test.partition('::')[0].rpartition('/')[2])
        for number, ((_, words), found) in enumerate(sorted(kinds.items())):
            cells = [cell([row for row in found if row.release == at]) for at in heads]
            ends = (
                ('', '') if number else (feature, ', '.join(f'`{test}`' for test in sorted(tests)))
            )
            lines.append(f'| {ends[0]} | {words} | {" | ".join(cells)} | {ends[1]} |')
    return lines


def cell(rows: list[Record]) -> str:
    """Return the outcomes, each with the releases of Transformer Engine that it was seen with."""
    found = defaultdict(set)
    for row in rows:
        found[SIGNS.get(row.outcome, row.outcome)].add(row.te)
    if len(found) > 1:
        found.pop(SIGNS[ABSENT], None)
    return '; '.join(
        sign if sign == SIGNS[ABSENT] or engines == {''} else f'{sign} {_engines(engines)}'
        for sign, engines in sorted(found.items())
    )


def _engines(versions: set[str]) -> str:
    """Return with whose layers: those of some releases, or Megatron's own, too."""
    of_others = sorted(versions - {''}, key=lambda version: [*map(int, version.split('.'))])
    return ', '.join(['own'] * ('' in versions) + [f'TE {version}' for version in of_others])


def _refused(rows: list[Record]) -> list[str]:
    """Return a line for each refusal: by which releases."""
    refusals = defaultdict(set)
    for row in rows:
        if row.refused:
            why = row.outcome.removeprefix('refused: ')
            refusals[row.feature, kind(row.schedule)[1], why].add(row.megatron)
    lines = ['| what | schedules | why | megatron-core |', '|---|---|---|---|']
    for (feature, schedules, why), releases in sorted(refusals.items()):
        lines.append(f'| {feature} | {schedules} | {why} | {", ".join(sorted(releases))} |')
    return lines


if __name__ == '__main__':
    print(page(), end='')
