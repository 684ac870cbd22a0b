"""Fixtures for all tiers."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import compiled
import grids
import nvidia
import pytest
import stock
import supported
import torch
import wheels
from hypothesis import settings
from ranks import Pool, Ranks

# A busy machine is no reason to fail.
settings.register_profile('no deadline', deadline=None)
settings.load_profile('no deadline')


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, words in {
        '--full': 'run the whole grids, not only a case of each row',
        '--one-case': 'run one case of each test, but all of those that look into a release: where '
        'another release runs all cases',
        '--record-support': 'write what the tests that pass show into docs/support.csv',
        '--list-support': 'print what the tests would show',
        '--fresh': 'make kept trainings by stock anew, too: each must leave what was kept of it',
    }.items():
        parser.addoption(name, action='store_true', help=words)
    parser.addoption(
        '--also',
        metavar='FLAG',
        action='append',
        default=[],
        help="give each run of NVIDIA's loop and of the example by our schedules this flag, too: "
        'what keeps all bits, such as --also=--pipeline-prewarm, keeps those of every row; tests '
        'that are marked `alone` are left out',
    )


class Failures:
    """Tells a failure when it comes, by two of its lines: the end of a run may be cut off."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, 'reprcrash', None)
            said = crash.message if crash else report.longreprtext
            lines = [line.strip() for line in said.splitlines() if line.strip()] or ['no reason']
            terminal = self._config.pluginmanager.get_plugin('terminalreporter')
            for line in dict.fromkeys((lines[0], lines[-1])):
                terminal.write_line(f'\n{report.nodeid}: {line[:400]}')


def pytest_configure(config: pytest.Config) -> None:
    compiled.prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    config.pluginmanager.register(Failures(config))
    nvidia.ALSO.extend(config.getoption('--also'))
    stock.FRESH = config.getoption('--fresh')
    if config.getoption('--record-support'):
        config.pluginmanager.register(supported.Recorder())
    if config.getoption('--list-support'):
        config.pluginmanager.register(supported.Lister())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    spared: set[pytest.Item] = set()
    if not config.getoption('--full'):
        spared |= {item for item in items if item.get_closest_marker('full')}
    if config.getoption('--also'):
        spared |= {item for item in items if item.get_closest_marker('alone')}
    if config.getoption('--one-case'):
        spared |= grids.beside_another([item for item in items if item not in spared])
    config.hook.pytest_deselected(items=list(spared))
    items[:] = [item for item in items if item not in spared]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print stock trainings, and with `--durations` what files took: tests do not add up."""
    stock.prune()
    if stock.counted:
        terminalreporter.write_line(f'stock trainings: {stock.summary()}')
    shown = config.getoption('durations')
    if not shown:
        return
    taken: Counter[str] = Counter()
    for report in [each for some in terminalreporter.stats.values() for each in some]:
        if isinstance(report, pytest.TestReport):
            taken[report.nodeid.partition('::')[0]] += report.duration
    terminalreporter.section(f'slowest {shown} files')
    for file, seconds in taken.most_common(shown):
        terminalreporter.write_line(f'{seconds:7.2f}s {file}')


@pytest.fixture(scope='session')
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(p)`: p processes in a group; the same processes for every test."""
    pool = Pool()
    yield lambda size: Ranks(size, pool)
    pool.stop()


@pytest.fixture(scope='session', params=wheels.VERSIONS)
def te_ranks(request) -> Iterator[Callable[[int], Ranks]]:
    """As `ranks`, in processes that have Transformer Engine: on CPU with emulated kernels, and
    memory that is not initialised filled with NaN."""
    if torch.cuda.is_available():
        if request.param != 'installed':
            pytest.skip('this machine has a GPU: the installed Transformer Engine is the one')
        pool = Pool()
    else:
        pool = Pool(wheels.install, wheels.transformer_engine(request.param))
    yield lambda size: Ranks(size, pool)
    pool.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `on_ranks(n)` on each of n ranks with its parameters, one of tests/dist
    marked `on_device` on the recorded device; one that asks for ranks itself as it is."""
    on, device = map(pyfuncitem.get_closest_marker, ('on_ranks', 'on_device'))
    names = pyfuncitem._fixtureinfo.argnames
    if (on is None and device is None) or {'ranks', 'te_ranks'} & {*names}:
        return None
    fixture, size = ('ranks', *on.args) if on else ('cuda_ranks', 1)
    size = pyfuncitem.funcargs.get(size, size)  # or the parameter that says how many
    fixture = 'te_ranks' if 'te_ranks' in pyfuncitem.fixturenames else fixture
    work = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem._request.getfixturevalue(fixture)(size).run(work)
    return True
