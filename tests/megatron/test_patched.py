"""A script with our two lines at its top has our flags, however it is started."""

import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from commands import run
from paths import ROOT

import megatron_zbpp

CHECKOUT = os.environ.get('MEGATRON_LM')
# what NVIDIA's checkout has to do with it, and nothing else
ARGUMENTS = """
import argparse


def add_megatron_arguments(parser):
    parser.add_argument('--num-layers', type=int, help='(about 50%)')
    parser.add_argument('--no-help')
    return parser


def parse_args():
    return add_megatron_arguments(argparse.ArgumentParser()).parse_known_args()[0]
"""
SCRIPT = """# License

'''Pretrain.'''

# Early.
import time

from megatron.training.arguments import parse_args

if __name__ == '__main__':
    parse_args()
"""


def checkout(folder: Path) -> Path:
    """A stand-in for Megatron-LM, or the real one, whose script is copied."""
    folder.mkdir()
    if CHECKOUT:
        for entry in Path(CHECKOUT).iterdir():
            (folder / entry.name).symlink_to(entry)
        (folder / 'pretrain_gpt.py').unlink()
        (folder / 'pretrain_gpt.py').write_text((Path(CHECKOUT) / 'pretrain_gpt.py').read_text())
        return folder
    (folder / 'megatron' / 'training').mkdir(parents=True)
    (folder / 'megatron' / 'training' / 'arguments.py').write_text(ARGUMENTS)
    (folder / 'pretrain_gpt.py').write_text(SCRIPT)
    return folder


def help_of(folder: Path) -> str:
    """`--help` of the script, started without our launcher, on the CPU; that of 0.18 and later ends
    in a traceback without our flags."""
    path = [Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook', ROOT]
    command = [sys.executable, 'pretrain_gpt.py', '--help']
    path = os.pathsep.join(map(str, path))
    return run(command, cwd=folder, env={'PYTHONPATH': path}, timeout=200).stdout


@pytest.mark.one_release
def test_flags_come_and_go(tmp_path):
    folder = checkout(tmp_path / 'Megatron-LM')
    apply = [sys.executable, ROOT / 'patches' / 'apply.py', folder]
    assert '--pipeline-schedule NAME' not in help_of(folder)
    run(apply).check_returncode()
    patched = help_of(folder)
    assert '--pipeline-schedule NAME' in patched and '--num-layers' in patched
    run([*apply, '--revert']).check_returncode()
    assert '--pipeline-schedule NAME' not in help_of(folder)


def late() -> tuple[bool, bool]:
    """Parses where the module was imported before: as often as asked, and with our flags."""
    import megatron_zbpp.mcore.command_line.arguments  # what it imports is to stay

    module, package = ModuleType('megatron.training.arguments'), ModuleType('megatron.training')
    exec(ARGUMENTS, vars(module))
    package.arguments = module
    modules = {'megatron.training': package, 'megatron.training.arguments': module}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(sys, 'argv', ['script']):
        megatron_zbpp.add_arguments()
        first = module.parse_args()
        megatron_zbpp.add_arguments()
        return first == module.parse_args(), hasattr(first, 'pipeline_schedule')


def test_after_the_import(ranks):
    assert ranks(2).run(late) == [(True, True)] * 2
