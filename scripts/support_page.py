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
LIMITS = RECORDS.with_name('limits.md')
HEAD = """# What is supported

For whoever wants to know whether a model, a setting or a release trains with our schedules. Figures
count features that a test trained, by release of megatron-core ([details](#details),
[refusals](#what-is-refused), [limits](limits.md)).

- **=** to the bit: losses, parameters and optimizer state are those of Megatron's own schedule
- **≈** within a tolerance
- **waits** to the bit, but optimizer steps are not validated later
- **passes** a test that is not ours
- **—** that release does not have the feature

0.20.0 is Megatron's main branch as of 22 August 2026. 0.17.1 and 0.18.2 were
[trained by launch lines](getting-started.md#on-your-megatron-lm), not in these tests.
"""
DETAILS = """
## Details

Letters behind a sign name the layers, if not Megatron's own alone: *m* Megatron's own, *a* those of
Transformer Engine 2.8.0, *b* of 2.20.2 (kernels emulated on a CPU). Schedules: *1* one stage a rank
(`1f1b`), *L* a loop (`interleaved`), *V* (`1f1b-v`), *2* two ways (`chimera`); *W*: with W passes
(`zb-h1`, `zb-interleaved`, `zb-v`, `dualpipe`); *+*: with post-validation; *megatron*: Megatron's
own; *auto*: planned. `output` and `input+output` are the layers that `--pipeline-vocab-parallel`
puts on all ranks; MTP: multi-token prediction. `--sft` has no entry for 0.16.1: its dataset cannot
be mocked, and Megatron's own run fails there.

`docs/support.csv` names the test of each record; a record without a test fails in CI. The page is
printed by

```bash
python scripts/support_page.py
```
"""
REASONS = 'Beside the settings among the [limits](limits.md#refusals-left), which say why:'
# pattern of the features of each topic; the first that matches counts
TOPICS = {
    'Seeds of dropout': 'dropout seeded',
    'Output layer and embedding on all ranks': 'output layer.* on all ranks',
    'Slices of sequences': 'slices of sequences',
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
# phrases of many features, and what the page says instead: flags, terms of Megatron and ours
SHORT = {
    'dropout seeded as in our 1f1b with `--pipeline-dropout-seeds`': '`--pipeline-dropout-seeds`',
    'dropout seeded as in our 1f1b with `dropout_seeds`': '`dropout_seeds`',
    'the output layer and the embedding, tied, on all ranks': '`input+output`, tied',
    'the output layer and the embedding on all ranks': '`input+output`',
    'the output layer on all ranks': '`output`',
    'from and to checkpoints of stock': "stock's checkpoints",
    'slices of sequences as without': 'slices as without',
    'optimizer steps that do not wait': 'early steps',
    'layers of experts in one product': 'grouped experts',
    'experts in one product': 'grouped experts',
    'layers with latent attention (MLA)': 'MLA',
    " of Transformer Engine's": '',
    'overlapped communication of experts': '`--overlap-moe-expert-parallel-comm`',
    'overlapped communication of grouped experts': (
        '`--overlap-moe-expert-parallel-comm`, grouped experts'
    ),
    'first iteration prepared in parallel': '`--pipeline-prewarm`',
    'training from scratch, the same start': 'from scratch',
    'checkpoints go from one schedule to the next': 'checkpoints between schedules',
    'weights from and to Hugging Face': 'Hugging Face weights',
    'stages of unlike numbers of layers': 'uneven stages',
    'multi-token prediction': 'MTP',
}
ABSENT = 'absent'
ENGINES = {'': 'm', '2.8.0': 'a', '2.20.2': 'b'}  # releases of Transformer Engine
OTHER_KINDS = ['any', 'megatron', 'auto']
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
    """Return the place and the symbol of a kind of schedules: those that Megatron treats alike."""
    name, _, later = schedule.partition('+')
    if name in OTHER_KINDS:
        place, symbol = 9 + OTHER_KINDS.index(name), name
    else:
        family = find(name)
        made = build(name, 4, 8)
        place = 1 if family.default_chunks == 1 else 3 if made.placement.is_loop else 5
        place = place if family.num_routes == 1 else 7
        symbol = {1: '1', 3: 'L', 5: 'V', 7: '2'}[place]
        if any(each.kind == 'W' for rank in made.passes for each in rank):
            place, symbol = place + 1, f'{symbol}W'
    return (place + 20, f'{symbol}+') if later else (place, symbol)


def page() -> str:
    """Return the page."""
    rows = read()
    shown = [row for row in rows if not row.refused]
    refused = ['', '## What is refused', '', REASONS, '', *_refused(rows), '']
    return '\n'.join([HEAD, *_matrix(shown), DETAILS, *_details(shown), *refused])


def shown(feature: str) -> str:
    """Return the feature as the page names it."""
    for phrase, short in SHORT.items():
        feature = feature.replace(phrase, short)
    return feature


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
    lines, heads = [], {release: release for release in _heads(rows)}
    for name, found in _by_topic(rows).items():
        features = len({row.feature for row in found})
        summary = f'{name}: {features} feature{"s" * (features != 1)}'
        lines += [f'<details id="{_anchor(name)}" markdown="1"><summary>{summary}</summary>', '']
        lines += [*_features(found, heads), '', '</details>', '']
    return lines[:-1]


def _features(rows: list[Record], heads: dict[str, str]) -> list[str]:
    """Return the table of outcomes: a line has all features with the same one, by name."""
    lines = [
        f'| {" | ".join(heads.values())} | what (schedules) |',
        '|---' * (1 + len(heads)) + '|',
    ]
    alike: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for feature, of_feature in groupby(rows, lambda row: row.feature):
        name, _, variant = shown(feature).rpartition(': ')
        for cells, kinds in _outcomes([*of_feature], heads).items():
            alike[cells][name, ', '.join(kinds)].append(variant)
    for cells, found in alike.items():
        names: dict[str, list[str]] = defaultdict(list)
        for (name, kinds), variants in found.items():
            names[name].append(f'{"; ".join(variants)} ({kinds})')
        texts = ('; '.join(features) for features in names.values())
        named = [
            f'**{name}**: {text}' if name else text for name, text in zip(names, texts, strict=True)
        ]
        lines.append(f'| {cells} | {". ".join(named)} |')
    return lines


def _outcomes(rows: list[Record], heads: dict[str, str]) -> dict[str, list[str]]:
    """Return kinds of schedules by the cells of a line: one cell for each release."""
    kinds, symbols = defaultdict(list), defaultdict(list)
    for row in rows:
        kinds[kind(row.schedule)].append(row)
    for (_, symbol), found in sorted(kinds.items()):
        cells = [cell([row for row in found if row.release == at]) for at in heads]
        symbols[' | '.join(cells)].append(symbol)
    return symbols


def cell(rows: list[Record]) -> str:
    """Return the outcomes, each with on whose layers it was seen, if not on Megatron's alone."""
    found = defaultdict(set)
    for row in rows:
        found[SIGNS.get(row.outcome, row.outcome)].add(row.te)
    if len(found) > 1:
        found.pop(SIGNS[ABSENT], None)
    return '; '.join(
        sign if sign == SIGNS[ABSENT] or engines == {''} else sign + _engines(engines)
        for sign, engines in sorted(found.items())
    )


def _engines(versions: set[str]) -> str:
    return ''.join(symbol for version, symbol in ENGINES.items() if version in versions)


def _refused(rows: list[Record]) -> list[str]:
    """Return a line for each reason that limits.md does not have."""
    refusals, reasons = defaultdict(lambda: (set(), set())), defaultdict(list)
    limits = LIMITS.read_text()
    for row in rows:
        why = row.outcome.removeprefix('refused: ')
        if row.refused and why not in limits:
            kinds, releases = refusals[why, row.feature]
            kinds.add(kind(row.schedule))
            releases.add(row.megatron)
    for (why, feature), (kinds, releases) in sorted(refusals.items()):
        symbols = ', '.join(symbol for _, symbol in sorted(kinds))
        reasons[why, symbols, ', '.join(sorted(releases))].append(shown(feature))
    lines = ['| what | schedules | why | megatron-core |', '|---|---|---|---|']
    for (why, symbols, releases), features in sorted(reasons.items()):
        lines.append(f'| {"; ".join(features)} | {symbols} | {why} | {releases} |')
    return lines


if __name__ == '__main__':
    print(page(), end='')
