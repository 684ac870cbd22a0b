"""Runs the files for SLURM with a stand-in for srun and zbpp, which keeps what it is given."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

FOLDER = ROOT / 'scripts' / 'slurm'
FILES = sorted(FOLDER.glob('gpt-*.sbatch'))  # one a model
EXPERTS = FOLDER / 'moe-8x7b.sbatch'
BENCHMARK = FOLDER / 'benchmark_gpt.sbatch'
BENCH = FOLDER / 'bench.sbatch'
_STAND_IN = """#!{python}
import json, os, sys
with open(os.environ['KEPT'], 'w') as kept:
    json.dump([sys.argv[1:], dict(os.environ)], kept)
"""
_SCONTROL = """#!/bin/sh
[ "$1 $2" = 'show hostnames' ] && printf 'node-a7\\nnode-a8\\n'
"""


@dataclass(frozen=True)
class Launched:
    status: int  # its exit status
    errors: str  # what it wrote to standard error
    # what srun was given, or zbpp, whichever came first; empty where neither was started
    argv: list[str]
    environment: dict[str, str]  # of that
    out: str  # what it wrote to standard output

    @property
    def torchrun(self) -> list[str]:
        return self.argv[self.argv.index('torchrun') :]

    @property
    def script(self) -> list[str]:
        (index,) = (k for k, word in enumerate(self.argv) if word.endswith('/pretrain_gpt.py'))
        return self.argv[index + 1 :]


def nodes(file: Path) -> int:
    return int(options(file)['nodes'])


def options(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines()
    pairs = (line.removeprefix('#SBATCH --') for line in lines if line.startswith('#SBATCH'))
    return {key: value for key, _, value in (pair.partition('=') for pair in pairs)}


def launch(
    file: Path,
    folder: Path,
    *arguments: str,
    programs: Mapping[str, str] | None = None,
    **environment: str,
) -> Launched:
    """Runs `file` as SLURM would, in `folder`, with the text of other programs if need be."""
    stand_in = _STAND_IN.format(python=sys.executable)
    stand_ins = {'srun': stand_in, 'zbpp': stand_in, 'scontrol': _SCONTROL}
    for name, text in {**stand_ins, **(programs or {})}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / 'spooled').write_text(file.read_text())  # SLURM runs a copy
    kept = folder / 'kept.json'
    kept.unlink(missing_ok=True)
    done = subprocess.run(
        ['bash', folder / 'spooled', *arguments],
        cwd=folder,
        env={
            'PATH': f'{folder}{os.pathsep}{os.environ["PATH"]}',
            'KEPT': str(kept),
            'MEGATRON_LM': '/opt/Megatron-LM',
            'DATA': '/data/my text/corpus_text_document',
            'SLURM_JOB_NAME': file.stem,
            'SLURM_JOB_ID': '4711',
            'SLURM_JOB_NODELIST': 'node-a[7-8]',
            'SLURM_NNODES': str(nodes(file)),
            'SLURM_SUBMIT_DIR': str(ROOT),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    argv, seen = json.loads(kept.read_text()) if kept.exists() else ([], {})
    return Launched(done.returncode, done.stderr, argv, seen, done.stdout)
