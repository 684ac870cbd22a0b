"""What tests show to be supported: a decorator that says it, and records of those that passed.

@supports('multi-token prediction, depth {depth}')
@grid(depth=(1, 2), schedule=('zb-h1', 'zb-v'))
def test_multi_token_prediction(ranks, depth, schedule): ...

python -m pytest tests/megatron/test_todays_models.py --record-support
python scripts/support_page.py > docs/support.md
"""

import csv
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import nvidia
import pytest
from paths import SUPPORT

from scripts.support_page import ABSENT, RECORDS, Record, read

BITS = 'bit-identical'
TOLERANCE = 'within tolerance'
WAITS = 'waits'
PASSES = 'passes'
_LACKS = 'not in this Megatron: '
# by parameter and value
_WORDS = dict(re.findall(r'^(\w+ .+): (.+)$', (SUPPORT / 'words.txt').read_text(), re.M))


def worded(params: dict[str, Any]) -> dict[str, Any]:
    """Return a test's parameters by name, each in the words of the page where it has some."""
    return {
        name: _WORDS.get(f'{name} {value}', value) if isinstance(value, str | None) else value
        for name, value in params.items()
    }


def supports(
    feature: str, schedules: str = '{schedule}', outcome: str = BITS
) -> pytest.MarkDecorator:
    """Says what a test shows when it passes; the test's parameters are filled in.

    Schedules are names between spaces; for the outcome see `Record`.
    """
    return pytest.mark.supports(feature, schedules, outcome)


def refuses(feature: str, why: str, schedules: str = 'any') -> pytest.MarkDecorator:
    """The same of a test that shows a refusal, and its reason."""
    return supports(feature, schedules, f'refused: {why}')


def absent(why: str) -> NoReturn:
    """Skips a test of what this Megatron lacks, and says why, since when: the page has it, too."""
    pytest.skip(_LACKS + why)


def claims(item: pytest.Item) -> Iterator[Record]:
    """What `item` shows when it passes here."""
    params = getattr(item, 'callspec', None)
    given: dict[str, Any] = dict(params.params) if params else {}
    measured = dict(getattr(item, 'user_properties', ()))
    trains = nvidia.needs_training.mark in item.iter_markers('skipif')
    here = nvidia.release() if nvidia.CHECKOUT and trains else metadata.version('megatron-core')
    megatron = measured.get('megatron', here)
    test = re.sub(r'\[.*', '', item.nodeid, flags=re.S)
    for mark in item.iter_markers('supports'):
        feature, schedules, outcome = (text.format(**worded(given)) for text in mark.args)
        for schedule in schedules.split():
            te = str(measured.get('te', given.get('te_ranks', '')))
            yield Record(feature, schedule, megatron, te, outcome, test)


def lacks(item: pytest.Item) -> Iterator[Record]:
    """What `item` says when it is skipped, since Megatron has no such thing here."""
    return (each._replace(outcome=ABSENT) for each in claims(item) if not each.refused)


def write(records: Iterable[Record]) -> None:
    """One line a record, in order: what two branches add merges."""
    with RECORDS.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(Record._fields)
        writer.writerows(sorted(set(records)))


class Recorder:
    """Plugin of pytest: adds what the tests that passed show, drops what no test shows any more."""

    def __init__(self) -> None:
        self._passed: set[Record] = set()
        self._claimed: set[tuple[str, ...]] = set()
        self._collected: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._claimed |= keys(item)
            self._collected.add(Path(item.nodeid.partition('::')[0]).as_posix())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Any:
        report = yield
        if report.when == 'call' and report.passed:
            self._passed.update(claims(item))
        elif report.skipped and f'Skipped: {_LACKS}' in str(report.longrepr):
            self._passed.update(lacks(item))
        return report

    def pytest_sessionfinish(self) -> None:
        shown = {record._replace(outcome='') for record in self._passed}
        known = [
            record
            for record in (read() if RECORDS.exists() else [])
            if record._replace(outcome='') not in shown
            and (
                record.test.partition('::')[0] not in self._collected
                or key(record) in self._claimed
            )
        ]
        write([*known, *self._passed])


def keys(item: pytest.Item) -> set[tuple[str, ...]]:
    """Return `key` of each record that `item` may write, here or elsewhere."""
    return {key(record) for record in (*claims(item), *lacks(item))}


def key(record: Record) -> tuple[str, ...]:
    """What is the same in each environment."""
    return record.feature, record.schedule, record.outcome, record.test


class Lister:
    """Plugin of pytest: prints what the tests show that were collected, as lines of CSV."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        import sys

        writer = csv.writer(sys.stdout, lineterminator='\n')
        writer.writerows(sorted(set[tuple[str, ...]]().union(*map(keys, items))))
        items.clear()
