"""Folders in which commands of a page run one after the other, and shorter ones."""

import re
import shutil
from pathlib import Path

import pages
from nsight_report import report
from paths import ROOT


def prepare(page: Path, folder: Path) -> None:
    (folder / 'docs' / 'pictures').mkdir(parents=True)
    (folder / 'examples').symlink_to(ROOT / 'examples')
    for name, text in pages.files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if page.stem == 'unbalanced':  # what a job of somebody's left: a log, traces, a report
        recorded = ROOT / 'tests' / 'unit' / 'partitioning' / 'recorded'
        shutil.copy(recorded / 'timers-all.log', folder / 'job.log')
        (folder / 'torch_profile').mkdir()
        for rank in (0, 1):
            trace = folder / 'torch_profile' / f'rank-{rank}.json.gz'
            shutil.copy(recorded / f'stock-{rank}.json.gz', trace)
        report(folder / 'report.sqlite')


def shorter(command: str, data: Path) -> str:
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
