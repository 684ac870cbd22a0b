"""What is published: the wheel, which plans, compares and draws by itself, sources, the patch."""

import doctest
import email
import importlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from commands import run
from paths import ROOT

import megatron_zbpp
from megatron_zbpp.ir.schedule import grid

# Runs lines of `zbpp` where none of those packages can be imported.
ALONE = """
import sys
for name in ('torch', 'megatron', 'numpy', 'tqdm', 'matplotlib', 'ortools', 'psutil'):
    sys.modules[name] = None
from megatron_zbpp.cli import main
for line in sys.argv[1:]:
    status = main(line.split())
    if status:
        sys.exit(f'{line}: {status}')
"""
NEEDS = 'Requires-Dist: '
MEGATRON = re.compile(r'extra == .megatron.')
SHAPE = '--pp 2 --microbatches 4'


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dist')
    sources = folder / 'sources'
    unpublished = shutil.ignore_patterns(
        '.git', '.venv*', 'build', 'runs', '*.egg-info', '.*_cache'
    )
    shutil.copytree(ROOT, sources, ignore=unpublished)
    # The environment's setuptools: a test needs no network.
    code = 'import sys; from setuptools import build_meta as build; '
    for kind in ('build_sdist', 'build_wheel'):
        done = run([sys.executable, '-c', f'{code} build.{kind}(sys.argv[1])', folder], cwd=sources)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def wheel(built):
    (path,) = built.glob('*.whl')
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_works_alone(wheel, tmp_path):
    name = f'megatron_zbpp-{megatron_zbpp.__version__}-py3-none-any.whl'
    assert Path(wheel.filename).name == name
    wheel.extractall(tmp_path / 'site')
    (metadata,) = tmp_path.glob('site/*.dist-info')
    assert 'zbpp = megatron_zbpp.cli:main' in (metadata / 'entry_points.txt').read_text()
    requires = [line for line in (metadata / 'METADATA').read_text().splitlines() if NEEDS in line]
    always = [line.removeprefix(NEEDS) for line in requires if 'extra ==' not in line]
    assert not any(line.startswith(('torch', 'megatron', 'numpy', 'matplotlib')) for line in always)
    brings = {
        re.match('[a-z0-9-]+', line.removeprefix(NEEDS))[0]
        for line in requires
        if MEGATRON.search(line)
    }
    assert brings == {'torch', 'numpy', 'megatron-core', 'pybind11'}, 'all that a first run takes'
    lines = (
        'list',
        f'compare {SHAPE} -o compare.html',
        f'page {SHAPE} --vpp 2 -o planner.html',
        f'compare {SHAPE} -o compare.svg',
        f'plan {SHAPE} --vpp 1 --seconds 1 --no-cache --json',
        f'simulate --schedule zb-v {SHAPE}',
        f'show --schedule zb-v {SHAPE}',
        f'convert --schedule zb-v {SHAPE} --to json -o zb-v.json',
        f'convert --schedule zb-v {SHAPE} --to html -o zb-v.html',
        'check zb-v.json',
    )
    env = {'PYTHONPATH': str(tmp_path / 'site')}
    done = run([sys.executable, '-c', ALONE, *lines], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for picture in ('compare.html', 'compare.svg', 'zb-v.html', 'planner.html'):
        assert (tmp_path / picture).stat().st_size > 1000
    assert (tmp_path / 'site/megatron_zbpp/py.typed').exists()


def test_the_page_of_the_package(wheel):
    """Every link of the README leads somewhere from outside the repository; pictures are raw."""
    (name,) = (name for name in wheel.namelist() if name.endswith('.dist-info/METADATA'))
    metadata = email.message_from_bytes(wheel.read(name))
    urls = dict(url.split(', ') for url in metadata.get_all('Project-URL'))
    links = re.findall(r'(!?)\[[^\]]*\]\(([^)]+)\)', metadata.get_payload())
    assert len(links) > 10 and metadata['Description-Content-Type'] == 'text/markdown'
    assert all(link.startswith(('https://', '#')) for _, link in links)
    pictures = {link.removeprefix(f'{urls["Source"]}/raw/main/') for mark, link in links if mark}
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)
    files = [link for _, link in links if link.startswith(f'{urls["Source"]}/blob/main/')]
    assert all((ROOT / link.partition('/main/')[2].partition('#')[0]).exists() for link in files)


def test_the_wheel_holds_every_file(wheel):
    names = wheel.namelist()
    held = {name for name in names if name.startswith('megatron_zbpp/')}
    assert {name.partition('/')[0] for name in names} == {
        'megatron_zbpp',
        f'megatron_zbpp-{megatron_zbpp.__version__}.dist-info',
    }, 'nothing beside it, such as the development tools'
    files = (path for path in (ROOT / 'megatron_zbpp').rglob('*') if path.is_file())
    ours = {str(path.relative_to(ROOT)) for path in files if '__pycache__' not in path.parts}
    assert held == ours


def test_without_development_tools(wheel, tmp_path):
    """A wheel has no emulated kernels of Transformer Engine: `--cpu` says where they are."""
    assert not [name for name in wheel.namelist() if 'nccl' in name or '/te/' in name]
    wheel.extractall(tmp_path / 'site')
    (tmp_path / 'pretrain.py').write_text('')
    asked = ['pretrain.py', '--transformer-impl', 'transformer_engine']
    command = [sys.executable, '-m', 'megatron_zbpp.launch', '--cpu', *asked]
    done = run(command, cwd=tmp_path, env={'PYTHONPATH': str(tmp_path / 'site')})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        'python -m megatron_zbpp.launch: error: transformer_engine: on a CPU it needs Transformer '
        "Engine's emulated kernels, which are in no wheel: run from a checkout of megatron_zbpp"
    )


def test_the_sources_come_with_tests_examples_and_docs(built):
    (archive,) = built.glob('*.tar.gz')
    with tarfile.open(archive) as sources:
        held = {name.partition('/')[2] for name in sources.getnames()}
    here = Path(__file__).relative_to(ROOT)
    wanted = {str(here), 'examples/gpt/README.md', 'scripts/test.sh', 'pyproject.toml', 'LICENSE'}
    assert wanted | {'devtools/nccl.py', 'devtools/te/gemm.py'} <= held
    assert any(name.startswith('docs/') for name in held)


# ---- The examples in docstrings are true.


MODULES = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
    for path in sorted((ROOT / 'megatron_zbpp').rglob('*.py'))
    if '>>> ' in path.read_text()
]


@pytest.mark.parametrize('name', MODULES)
def test_doctest(name):
    """Drawings of schedules have `grid` at hand."""
    result = doctest.testmod(importlib.import_module(name), extraglobs={'grid': grid})
    assert result.attempted and not result.failed


# ---- The patch of pretrain_gpt.py: applied, checked, reverted, refused with what to do.


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
