"""The first hours of users, by what the README, two pages and the example's README tell to type."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch
import walks
from forked import run
from nvidia import CHECKOUT, COMMON, SCRIPT, needs_training
from paths import ROOT, SUPPORT
from tables import rows_of

import megatron_zbpp
from megatron_zbpp.cli import main
from megatron_zbpp.emulation import CPU_FLAGS
from megatron_zbpp.ir.timeline import MEANING
from megatron_zbpp.mcore import enabled

pytestmark = pytest.mark.one_release


DOCS = ROOT / 'docs'
PATH = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'


def steps(printed, last):
    """Iterations that NVIDIA's loop has logged with a loss, of a training of so many."""
    found = re.findall(rf'iteration +(\d)/ +{last} \|.*lm loss: [\d.E+-]+ \|', printed)
    return [*map(int, found)]


def ranking():
    """Rows of the table that the page has of latencies, as they are printed."""
    found = re.findall(
        r'^\| `(.+)`, (best|even) \|(.*) \|$', (DOCS / 'unbalanced.md').read_text(), re.M
    )
    return [
        rf'{name}, {kind} +{r" +".join(times.split(" | "))}\n'.replace('  +', ' +')
        for name, kind, times in found
    ]


BY_README = 'in tests/megatron/test_readme.py::test_zbpp_commands'
WALKS = {name: rows_of('walks.txt', name) for name in ('README', 'getting-started', 'unbalanced')}
# patterns of `walks.txt` by name
NAMED = {name: sum(rows_of('walks.txt', name), ()) for name in ('IDLE', 'PLANNED', 'FITTED')}


@pytest.mark.parametrize('name', WALKS)
def test_walk(name, tmp_path, monkeypatch, capsys):
    """All commands of the page, in one folder; each prints what is wanted of it, and no error."""
    page = pages.README if name == 'README' else DOCS / f'{name}.md'
    walks.prepare(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('COLUMNS', '120')
    named = NAMED | {'RANKING': ranking()}
    typed, walk = pages.lines(page), WALKS[name]
    assert len(typed) == len(walk), 'a command was added or left out: give it a row'
    for line, (start, *wanted) in zip(typed, walk, strict=True):
        assert line.startswith(start)
        if wanted[0].startswith('in '):
            file, test = wanted[0].removeprefix('in ').split('::')
            assert (f'def {test}(' if test else Path(start).name) in (ROOT / file).read_text()
            continue
        words = shlex.split(walks.shorter(line, tmp_path))
        if words[1] == 'doctor':  # it looks for Megatron in a process of its own
            command = [sys.executable, '-m', 'megatron_zbpp.cli', *words[1:]]
            done = run(command, cwd=tmp_path, env={'PYTHONPATH': str(ROOT)})
            code, out, errors = done.returncode, done.stdout, done.stderr
        else:
            code = main(words[1:])
            out, errors = capsys.readouterr()
        assert code == 0, (line, errors)
        for pattern in [each for cell in wanted for each in named.get(cell, [cell])]:
            assert re.search(pattern, out), (line, pattern, out)


@needs_training
def test_rolling_back(tmp_path):
    """The page's commands, one after the other: stock goes on where a V stopped, and saves."""
    lines = [
        each for each in pages.lines(DOCS / 'troubleshooting.md') if each.startswith('torchrun')
    ]
    assert ['--pipeline-schedule' in each for each in lines] == [True, False]
    for until, line in zip((2, 4), lines, strict=True):
        line = line.replace('-m megatron_zbpp.launch ', '')  # stock, too, needs it on a CPU
        script = f'-m megatron_zbpp.launch --cpu {SCRIPT}'
        line = line.replace('/path/to/Megatron-LM/pretrain_gpt.py', script)
        line = line.replace('--nproc-per-node 8', '--standalone --nproc-per-node 2')
        filling = [*COMMON, '--train-iters', str(until), '--global-batch-size', '4']
        filling += ['--override-opt_param-scheduler']
        filling += ['--exit-on-missing-checkpoint'] if until == 4 else []
        line = line.replace('-size 8', '-size 2').replace('...', shlex.join(filling))
        words = [sys.executable, '-m', 'torch.distributed.run', *shlex.split(line)[1:]]
        done = run(words, cwd=tmp_path, env={'PYTHONPATH': str(ROOT)}, timeout=200)
        assert done.returncode == 0, done.stderr
        assert ('zb-v on 2 ranks' in done.stdout + done.stderr) == (until == 2)
        assert steps(done.stdout, until) == [until - 1, until], done.stdout
        latest = tmp_path / 'checkpoints/latest_checkpointed_iteration.txt'
        assert latest.read_text() == str(until)


def test_figures_of_a_loop(tmp_path):
    """Telemetry's function in the program of the first page: figures of each iteration, once."""
    (code,) = (b.text for b in pages.blocks() if 'def log_pipeline' in b.text)
    program = pages.files(DOCS / 'getting-started.md')['train.py']
    step = '    optimizer.step()\n'
    assert step in program
    first = 'print if torch.distributed.get_rank() == 1 else None'
    logged = f'{step}    write = {first}\n    log_pipeline(iteration, write and shown)\n'
    shown = 'def shown(row, step):\n    print(row, step)\n'
    (tmp_path / 'train.py').write_text(f'{code}\n{shown}\n{program.replace(step, logged)}')
    words = '-m torch.distributed.run --standalone --nproc-per-node 2 train.py'.split()
    done = run([sys.executable, *words], cwd=tmp_path, env={'PYTHONPATH': str(ROOT)}, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r'^(\{.*\}) (\d+)$', done.stdout, re.M)
    assert [int(step) for _, step in rows] == [*range(20)]
    page = (DOCS / 'troubleshooting.md').read_text()
    for row, _ in rows:
        found = ast.literal_eval(row)
        assert all(f'| `{name}` |' in page for name in found) and len(found) == 3
        assert 0 <= found['pipeline/bubble'] <= found['pipeline/idle-all-ranks'] < 1
        assert found['pipeline/live-activations'] == 2


PAGE = ROOT / 'docs' / 'unbalanced.md'
FIVE = re.search(r'## In five commands\n.*?```bash\n(.*?)```', PAGE.read_text(), re.S)[1]
SMALLER = {
    '--nproc-per-node 4': '--nproc-per-node 2',
    '-size 4': '-size 2',
    '--pp 4': '--pp 2',
    '--microbatches 8': '--microbatches 4',
    '--seconds 5': '--seconds 1',
    '/path/to/Megatron-LM/pretrain_gpt.py': f'--cpu {SCRIPT}',
    '...': shlex.join([*COMMON, '--train-iters', '6', '--global-batch-size', '4']),
    'torchrun': f'{sys.executable} -m torch.distributed.run --standalone',
}


@needs_training
def test_from_a_run_to_a_better_layout(tmp_path):
    """On two ranks of the CPU, with four layers; the second run has the plan's layout."""
    lines = FIVE.splitlines()
    assert len(lines) == 5 and set(lines) <= {c.line for c in pages.commands()}
    for there, here in SMALLER.items():
        lines = [line.replace(there, here) for line in lines]
    command = ['bash', '-exo', 'pipefail', '-c', '\n'.join(lines)]
    env = {'PATH': PATH, 'PYTHONPATH': str(ROOT)}
    done = run(command, cwd=tmp_path, env=env, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'largest error of a stage' in done.stdout
    stages = json.loads((tmp_path / 'trace' / 'stages.json').read_text())
    assert [len(stages[kind]) for kind in 'FBW'] == [2, 2, 2]
    assert stages['layout'] == 'Ett|ttL'
    layout = json.loads((tmp_path / 'better.json').read_text())['layout']
    assert f'layers as the plan has them: {layout}' in done.stderr
    assert steps(done.stdout, 6) == [*range(1, 7)] * 2


def test_quickstart(tmp_path):
    text = tmp_path / 'own.txt'
    text.write_text(
        'All happy families are alike; each unhappy family is unhappy in its own way.\n' * 4000
    )
    command = [sys.executable, 'scripts/quickstart.py', '--ranks', '2', '--input', text]
    command += '--iterations 3 --hidden-size 16 --seq-length 16 --microbatches 2'.split()
    done = run([*command, '--output', tmp_path / 'out'], cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith(('Megatron', 'zb-'))]
    assert len(rows) == 3
    assert rows[0].split()[3] == 'reference'
    assert all('bit for bit' in row for row in rows[1:])
    losses = {row.split('1F1B')[-1].split('zb-h1')[-1].split('zb-v')[-1].split()[0] for row in rows}
    assert len(losses) == 1
    pictures = [line.removeprefix('wrote ') for line in done.stdout.splitlines() if 'wrote' in line]
    assert len(pictures) == 2
    for picture in pictures:
        assert Path(picture).read_bytes().startswith(b'\x89PNG')
    for schedule in ("Megatron's 1F1B", 'zb-h1', 'zb-v'):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f'{schedule:16}')]
        (last,) = lines  # of three iterations; no bar, as this is no terminal
        assert re.fullmatch(rf'{schedule:16}: 3/3, loss \d+\.\d+', last)
    assert 'differences in s/iteration are noise' in done.stdout
    assert 'idle GPU time' in done.stdout and MEANING in done.stdout


def test_quickstart_refuses_one_rank():
    """As a user calls it; without set-up where this environment is not of its making."""
    made = (Path(sys.prefix) / 'installed').exists()
    command = (
        ['bash', 'scripts/quickstart.sh'] if made else [sys.executable, 'scripts/quickstart.py']
    )
    env = {'VENV': sys.prefix, 'PYTHON': sys.executable}
    done = run([*command, '--ranks', '1'], cwd=ROOT, env=env)
    assert done.returncode == 2
    assert '--ranks 1 is too small' in done.stderr


def test_a_node_of_many_cores_and_gpus(monkeypatch):
    """Four ranks on the CPU, whatever the machine has."""
    monkeypatch.syspath_prepend(str(ROOT / 'scripts'))
    from quickstart import environment, parse_args

    for cores, ranks in ((224, 4), (3, 3), (1, 2), (None, 2)):
        monkeypatch.setattr('os.cpu_count', lambda cores=cores: cores)
        assert parse_args([]).ranks == ranks
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    assert environment()['CUDA_VISIBLE_DEVICES'] == ''


# ---- Every command in the README of the GPT example, shorter; those for a GPU, on the CPU.


OF_GPT = (ROOT / 'examples' / 'gpt' / 'README.md').read_text()
SETTING, *BLOCKS = re.findall(r'```bash\n(.*?)```', OF_GPT, re.S)
SNIPPETS = re.findall(r'```python\n(.*?)```', OF_GPT, re.S)
CHILDREN = Path(megatron_zbpp.__file__).parent / 'emulation' / 'subprocess_hook'


def megatron_lm(folder: Path) -> Path:
    """A folder like a checkout, whose script can be patched."""
    folder.mkdir()
    for entry in Path(CHECKOUT).iterdir() if CHECKOUT else ():
        (folder / entry.name).symlink_to(entry)
    if not CHECKOUT:
        (folder / 'megatron' / 'training').mkdir(parents=True)
        (folder / 'megatron' / 'training' / 'arguments.py').touch()
    (folder / 'pretrain_gpt.py').unlink(missing_ok=True)
    (folder / 'pretrain_gpt.py').write_text(SCRIPT.read_text())
    for name in ('packed.py', 'few_documents.py'):  # which that imports without a checkout
        (folder / name).symlink_to(SUPPORT / name)
    return folder


def on_cpu(block: str) -> str:
    """The block, with what a machine without a GPU needs."""
    if torch.cuda.is_available():
        return block
    block = re.sub(r'megatron_zbpp\.launch(?! --cpu)', 'megatron_zbpp.launch --cpu', block)
    flags = ' '.join(CPU_FLAGS)
    return re.sub(r'(--nproc-per-node \d+ "\$MEGATRON_LM/pretrain_gpt.py")', rf'\1 {flags}', block)


def outcome(block: str, folder: Path, data: Path) -> str:
    """What the commands of the block print, run in a folder with the project's files."""
    for entry in ('examples', 'patches', 'scripts'):
        (folder / entry).symlink_to(ROOT / entry)
    commands = SETTING + on_cpu(block).replace(
        'examples/gpt/pretrain_gpt.py', f'examples/gpt/pretrain_gpt.py --data-path {data}'
    )
    commands = commands.replace('--train-iters 10', '--train-iters 2')
    # found before others of the name, and in the processes that torchrun starts
    done = run(
        ['bash', '-euo', 'pipefail', '-c', commands],
        cwd=folder,
        env={
            'MEGATRON_LM': str(megatron_lm(folder / 'Megatron-LM')),
            'PATH': PATH,
            'PYTHONPATH': f'{CHILDREN}{os.pathsep}{ROOT}',
        },
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_blocks_are_all_run():
    assert len(BLOCKS) == 7 and len(SNIPPETS) == 2


def test_example(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'pretrain_gpt.py' in block and 'LM' not in block]
    said = outcome(block, tmp_path, data)
    assert steps(said, 2)[-1] == 2
    told = [line for line in said.splitlines() if line.startswith('megatron_zbpp')]
    assert len(told) == 5, 'one rank says what runs, once'
    assert told[0].endswith(': zb-v on 2 ranks x 2 chunks, 4 microbatches')
    assert told[1] == 'megatron_zbpp: layers of each rank, by chunk: 2+2, 2+2'
    assert ': simulated with F = B = W: idle GPU time ' in told[2] and 'activations' in told[3]


def test_minimal(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'minimal.py' in block]
    said = outcome(block, tmp_path, data)
    losses = list(map(float, re.findall(r'\| loss ([\d.]+) \| idle GPU time', said)))
    assert len(losses) == 10 and 5.0 < losses[0] < 6.0 and losses[-1] < losses[0] - 0.5, said


@needs_training
@pytest.mark.parametrize(
    'block', [block for block in BLOCKS if 'megatron_zbpp.launch' in block], ids=[1, 2, 3]
)
def test_launched(block, tmp_path, data):
    assert steps(outcome(block, tmp_path, data), 2)[-1] == 2


@needs_training
def test_patched(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'patches/' in block]
    said = outcome(block, tmp_path, data)
    assert steps(said, 2)[-1] == 2
    assert said.index('pretrain_gpt.py: patched') < said.rindex('pretrain_gpt.py: reverted')


def test_doctor(tmp_path, data):
    (block,) = [block for block in BLOCKS if 'zbpp doctor' in block]
    assert 'zb-v' in outcome(block, tmp_path, data)


@pytest.mark.on_ranks(2)
def test_own_program():
    """Both snippets, one after the other: while they are enabled the function is ours."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    names: dict = {}
    own = get_forward_backward_func(2, 2)
    try:
        for snippet in SNIPPETS:
            exec(snippet, names)
            assert get_forward_backward_func(2, 2) is not own
    finally:
        enabled.plugin.disable()
    assert names['layout'].text == 'Ett|tt|tt|ttL'
