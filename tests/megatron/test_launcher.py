"""The launcher: its own errors, our flags in the script's --help, and layers as they are asked."""

import json
import os
import shutil
import sys
from pathlib import Path

import commands
import forked
import pytest
from nvidia import CHECKOUT, COMMON, SCRIPT, by, go_on, needs_training, run
from paths import SUPPORT

from megatron_zbpp.launch.flags import FLAGS

PIPELINE = ['--pipeline-model-parallel-size', 2, '--global-batch-size', 4, '--train-iters', 3]
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason='needs a checkout: MEGATRON_LM names it')
BUILT = shutil.ignore_patterns('helpers_cpp*')


def launched(*argv, how=forked.run, **env):
    command = [sys.executable, '-m', 'megatron_zbpp.launch', *argv]
    return how(command, env={'COLUMNS': '10000', **env}, timeout=200)


@pytest.mark.one_release
def test_no_script():
    done = launched('--cpu', '/nowhere/a.py', '--pipeline-schedule', 'zb-v')
    said = 'no script /nowhere/a.py: give the path of a training script of Megatron-LM'
    assert done.stderr == f'python -m megatron_zbpp.launch: error: {said}\n'
    assert done.returncode == 2


@pytest.mark.one_release
def test_its_own_help():
    """The example as it is to be typed, and all of our flags."""
    done = launched('--help')
    assert done.returncode == 0, done.stderr
    assert '/path/to/pretrain_gpt.py ... \\\n        --pipeline-schedule zb-v\n' in done.stdout
    said = ' '.join(done.stdout.split())
    for flag in FLAGS:
        assert f'{flag.name} {flag.unit} {flag.text}'.replace('  ', ' ') in said, flag
    assert 'Data is loaded without workers unless --num-workers says otherwise' in said


@needs_training
def test_no_workers_load_data_on_a_cpu(tmp_path):
    """Unless the user asks for some, whose flag comes later."""
    script = tmp_path / 'script.py'
    script.write_text('import sys; print(*sys.argv[1:])')
    done = launched('--cpu', script, '--num-workers', 2)
    words = done.stdout.split()
    assert words[-2:] == ['--num-workers', '2'], done.stderr
    assert '--num-workers=0' in words


@needs_training
@pytest.mark.parametrize(
    ('does', 'code', 'told'),
    [
        ('raise SystemExit(3)', 3, 1),
        ("import megatron_zbpp; megatron_zbpp.enable('zb-v')", 0, 0),
    ],
    ids=['exit', 'enable'],
)
def test_a_script_that_is_not_megatrons(tmp_path, does, code, told):
    """At its end one line says that the schedule changed nothing, unless it asks for one itself."""
    (script := tmp_path / 'hello.py').write_text(f"print('hello')\n{does}\n")
    done = launched('--cpu', script, '--pipeline-schedule', 'zb-v')
    assert (done.stdout, done.returncode) == ('hello\n', code)
    line = f'{script} did not read the flags of Megatron-LM: no schedule was asked for'
    line = f'megatron_zbpp: {line}'
    assert [each.startswith(line) for each in done.stderr.splitlines()].count(True) == told


@needs_training
def test_torchrun_repeats_why_it_ends():
    """Else its own report of 50 lines hides it; it may end rank 0 before that has spoken."""
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    words = [*COMMON, '--pipeline-model-parallel-size', '2', '--pipeline-schedule', 'zb-x']
    words = [*launcher, '-m', 'megatron_zbpp.launch', '--cpu', str(SCRIPT), *words]
    done = commands.run(words, timeout=150)
    said = f"{SCRIPT.name}: error: unknown schedule 'zb-x'"
    lines = done.stderr.splitlines()
    assert done.returncode and sum(line.startswith(said) for line in lines) <= 1
    assert any(said in line for line in lines[-6:]), done.stderr


@needs_training
def test_help():
    """Each flag of an option is one, with its text as help; Megatron's are there, too."""
    done = launched('--cpu', str(SCRIPT), '--help')
    assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr
    lines = [' '.join(line.split()) for line in done.stdout.splitlines()]
    assert any(line.startswith('--num-layers ') for line in lines)
    for flag in FLAGS:
        at = next(i for i, line in enumerate(lines) if f'{line} '.startswith(f'{flag.name} '))
        assert flag.text in f'{lines[at]} {lines[at + 1]}', flag


@needs_training
def test_one_rank_trains_on(ranks):
    """Without a pipeline there is nothing to schedule, and nothing changes."""
    flags = ['--global-batch-size', 2, '--train-iters', 2]
    assert run(ranks(1), *flags, '--pipeline-schedule', 'zb-v') == run(ranks(1), *flags)


@needs_training
@pytest.mark.parametrize(
    ('layers', 'ours'),
    [
        (4, '--num-layers-per-virtual-pipeline-stage 1'),
        (6, '--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split'),
    ],
    ids=['virtual', 'ends'],
)
def test_layers_where_they_are_asked(ranks, tmp_path, layers, ours):
    """Uneven ones are in `test_launch.py`, a layout in `test_layouts.py`."""
    common = [*PIPELINE, '--num-layers', layers, '--clip-grad', 1e9]
    go_on(ranks(2), tmp_path, common, [*ours.split(), *by('zb-v')])


@needs_checkout
@pytest.mark.parametrize('compiler', [True, False], ids=['pybind11', 'without'])
def test_helpers_that_are_to_be_compiled(tmp_path, compiler):
    """Where pybind11 is missing, rank 0 and the doctor say so before a C++ compiler would."""
    datasets = Path(CHECKOUT, 'megatron', 'core', 'datasets')
    shutil.copytree(datasets, tmp_path / datasets.relative_to(CHECKOUT), ignore=BUILT)
    for folder in (datasets, datasets.parent):  # the rest of the checkout is as it is
        for each in folder.parent.iterdir():
            if each != folder:
                (tmp_path / each.relative_to(CHECKOUT)).symlink_to(each)
    script, path = tmp_path / 'ran.py', tmp_path / 'bin'
    script.write_text("print('ran')")
    path.mkdir()
    python = path / 'python3'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {"" if compiler else "-S"} "$@"')
    python.chmod(0o755)
    env = {'PATH': f'{path}:{os.environ["PATH"]}', 'RANK': '0'}
    why = 'python3 has no pybind11, with which Megatron compiles its helpers for data'
    cure = 'python3 -m pip install pybind11'
    done = launched('--cpu', script, how=commands.run, **env)
    assert (done.returncode, done.stdout) == ((0, 'ran\n') if compiler else (2, '')), done.stderr
    assert done.stderr.endswith(f'launch: error: {why}: {cure}\n') != compiler, done.stderr
    if not compiler:  # other ranks compile nothing
        other = launched('--cpu', script, how=commands.run, **{**env, 'RANK': '1'})
        assert other.stdout == 'ran\n'
    doctor = [sys.executable, '-m', 'megatron_zbpp.cli', 'doctor', '--json', '--']
    told = commands.run([*doctor, 'megatron_zbpp.launch', '--cpu', script, *COMMON], env=env)
    assert (f'{why}: {cure}' in json.loads(told.stdout)['launch_line']['notes']) != compiler


@pytest.mark.one_release
def test_a_package_that_megatron_lacks(tmp_path):
    """It is named with how to get it; nothing of ours can stand in for it."""
    (package := tmp_path / 'megatron' / 'training').mkdir(parents=True)
    (package / '__init__.py').touch()
    (package / 'arguments.py').write_text('import six_of_nowhere\n')
    (script := tmp_path / 'pretrain.py').touch()
    done = launched('--cpu', script, how=commands.run)
    assert done.returncode == 2 and 'enable()' not in done.stderr
    assert 'Traceback' not in done.stderr, done.stderr
    assert 'megatron.training.arguments imports: pip install six_of_nowhere' in done.stderr
    (tmp_path / 'six_of_nowhere.py').touch()  # the cure
    done = launched('--cpu', script, how=commands.run)
    assert 'six_of_nowhere' not in done.stderr, done.stderr
    assert 'Traceback' not in done.stderr and 'our flags would be unknown' in done.stderr


@needs_training
def test_enabled_before_the_import_of_the_loop():
    """The plugin reaches what comes, and leaves nothing."""
    done = commands.run([sys.executable, SUPPORT / 'early.py', CHECKOUT or ''], timeout=200)
    assert done.returncode == 0, done.stderr
    before, enabled, after = map(set, json.loads(done.stdout.splitlines()[-1]))
    schedules = 'megatron.core.pipeline_parallel.schedules'
    assert f'{schedules}.forward_backward_pipelining_with_interleaving' in before
    assert not any(place.startswith('megatron.training') for place in before)
    names = {place.rpartition('.')[2] for place in enabled}
    assert {'build_train_valid_test_data_loaders', 'get_batch_on_this_tp_rank'} <= names
    assert 'megatron.training.training.build_train_valid_test_data_loaders' in enabled
    assert not after
