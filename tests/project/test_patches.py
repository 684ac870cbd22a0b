"""The patch of pretrain_gpt.py: applied, checked, reverted, and refused with what to do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PATCHES = ROOT / 'patches'
OURS = 'import megatron_zbpp\nmegatron_zbpp.add_arguments()\n'


# how the script has begun in one release or another; and what is refused: an option, what is said
SCRIPTS = json.loads(Path(__file__).with_name('pretrain_scripts.json').read_text())
HEADERS = SCRIPTS['headers']


def checkout(folder: Path, script: str) -> Path:
    (folder / 'megatron' / 'training').mkdir(parents=True)
    (folder / 'megatron' / 'training' / 'arguments.py').write_text('')
    (folder / 'pretrain_gpt.py').write_text(script)
    return folder


def apply(*arguments: str | Path) -> tuple[int, str]:
    """Exit status, and all that was printed."""
    done = subprocess.run(
        [sys.executable, PATCHES / 'apply.py', *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize('header', HEADERS.values(), ids=HEADERS)
def test_there_and_back(tmp_path, header):
    folder = checkout(tmp_path, header)
    script = folder / 'pretrain_gpt.py'
    status, said = apply(folder, '--check')
    assert status == 1 and 'not patched; the patch applies' in said
    assert script.read_text() == header, 'only looked at'
    assert apply(folder)[0] == 0
    patched = script.read_text()
    assert patched.replace(OURS, '') == header and patched.count(OURS) == 1
    status, said = apply(folder, '--check')
    assert status == 0 and said.endswith(': patched\n')
    assert apply(folder, '--revert')[0] == 0
    assert script.read_text() == header


def test_by_git_alone(tmp_path):
    folder = checkout(tmp_path, HEADERS['blank line'])
    subprocess.run(['git', 'init', '-q', folder], check=True)
    command = ['git', '-C', folder, 'apply', '--unidiff-zero', PATCHES / 'pretrain_gpt.patch']
    subprocess.run(command, check=True)
    assert apply(folder, '--check')[0] == 0


def test_within_another_repository(tmp_path):
    subprocess.run(['git', 'init', '-q', tmp_path], check=True)
    folder = checkout(tmp_path / 'vendored', HEADERS['blank line'])
    assert apply(folder)[0] == 0
    assert OURS in (folder / 'pretrain_gpt.py').read_text()


def test_revert_finds_lines_that_moved(tmp_path):
    edited = '# my own\n# my own\n' + HEADERS['blank line'].replace('# Early.\n', OURS)
    folder = checkout(tmp_path, edited)
    assert apply(folder, '--revert')[0] == 0
    assert (folder / 'pretrain_gpt.py').read_text() == edited.replace(OURS, '')


@pytest.mark.parametrize(('script', 'option', 'said'), SCRIPTS['refused'].values())
def test_refused(tmp_path, script, option, said):
    folder = checkout(tmp_path, script)
    status, message = apply(folder, *filter(None, [option]))
    assert status == 2 and said in message, message
    assert str(folder) in message
    assert (folder / 'pretrain_gpt.py').read_text() == script, 'nothing changed'


def test_twice_can_be_undone(tmp_path):
    folder = checkout(tmp_path, OURS + HEADERS['no comment'] + OURS)
    for expected in (0, 0, 2):
        assert apply(folder, '--revert')[0] == expected
    assert (folder / 'pretrain_gpt.py').read_text() == HEADERS['no comment']


def test_no_checkout_and_help(tmp_path):
    status, said = apply(tmp_path)
    assert status == 2
    assert 'no checkout of Megatron-LM: it has no pretrain_gpt.py; give its folder' in said
    status, said = apply('--help')
    assert status == 0
    assert '--check' in said and '--revert' in said and 'git apply --unidiff-zero' in said
