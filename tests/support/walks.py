"""Folders in which commands of a page run one after the other, and shorter ones."""

import re
import shutil
from pathlib import Path

import pages
from nsight_report import report
from paths import ROOT


def prepare(page: Path, folder: Path) -> None:
    """Writes the files that a page shows, and those of a job where it reads some."""
    (folder / 'docs' / 'pictures').mkdir(parents=True)
    (folder / 'examples').symlink_to(ROOT / 'examples')
    for name, text in pages.files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if page.stem == 'unbalanced':
        _add_recorded(folder)


def shorter(command: str, data: Path) -> str:
    """The command, with less to search and to train."""
    if command.startswith('zbpp partition'):
        return re.sub(r' --seconds \d+', ' --seconds 1', command)
    if command.startswith('zbpp plan'):
        command = re.sub(r' --seconds \d+', '', command)
        command = re.sub(r'(--frontier [\d.]+),[\d.,]+,', r'\1,', command)
        return command.replace('zbpp plan', 'zbpp plan --seconds 1')
    if command.startswith('zbpp page'):
        return f'{command} --pp 2,4 --microbatches 4 --vpp 2'
    if 'examples/gpt' in command:
        command = command.replace('per-node 4', 'per-node 2').replace('-size 4', '-size 2', 1)
        return f'{command} --train-iters 2 --data-path {data}'
    return command


def _add_recorded(folder: Path) -> None:
    """Puts there what a job of somebody's left: a log, traces, a report."""
    recorded = ROOT / 'tests' / 'unit' / 'partitioning' / 'recorded'
    (folder / 'torch_profile').mkdir()
    shutil.copy(recorded / 'timers-all.log', folder / 'job.log')
    for rank in (0, 1):
        shutil.copy(
            recorded / f'stock-{rank}.json.gz', folder / 'torch_profile' / f'rank-{rank}.json.gz'
        )
    report(folder / 'report.sqlite')
