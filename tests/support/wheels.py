"""Python sources of packages that are not installed: of their wheels, which build nothing."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from once import made_once, reason

OLDEST, NEWEST = '2.8.0', '2.20.2'  # of what setup.py allows
VERSIONS = (OLDEST, NEWEST)
if importlib.util.find_spec('transformer_engine') is not None:
    VERSIONS = (*VERSIONS, 'installed')


def transformer_engine(version: str) -> Path:
    if version == 'installed':
        spec = importlib.util.find_spec('transformer_engine')
        return Path(spec.submodule_search_locations[0]).parent
    return unpacked('transformer-engine', version)


def unpacked(package: str, version: str, *options: str) -> Path:
    """The folder of a package's sources: of its wheel, downloaded once.

    Skips the test where it cannot be had.
    """

    def download(part: Path) -> None:
        command = '--quiet --no-deps --retries 1 --only-binary :all: --dest'.split()
        pip(f'{package}=={version}', 'download', *command, part, f'{package}=={version}', *options)
        (wheel,) = part.glob('*.whl')
        zipfile.ZipFile(wheel).extractall(part)

    return made_once(Path(sys.prefix) / package.replace('-', '_') / version, download)


def pip(what: str, *words: object) -> None:
    """Runs pip; skips the test where it cannot get what is wanted."""
    command = [sys.executable, '-m', 'pip', *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if done.returncode:
        pytest.skip(f'{what} cannot be had by pip: {reason(done.stderr)}')


def install(folder: Path) -> None:
    """Makes Transformer Engine's own modules run in this process, with emulated kernels."""
    from devtools.te import fill_uninitialized_memory
    from megatron_zbpp.emulation import te

    te.install(folder)
    fill_uninitialized_memory()


def skip_oldest(request: pytest.FixtureRequest, why: str) -> None:
    """Skips what the oldest release cannot do, by Megatron's own schedules either."""
    if request.node.callspec.params['te_ranks'] == OLDEST:
        pytest.skip(f'Transformer Engine {OLDEST} {why}')
