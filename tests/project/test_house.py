"""The figures of the house stay under ceilings that only fall, and their counts can count."""

import re
import shutil
import subprocess
import sys
import types

import pytest
from paths import ROOT

from scripts import house

COMMITS = 20


@pytest.mark.parametrize('figure', house.FIGURES, ids=lambda figure: figure.name)
def test_figures_stay_under_their_ceilings(figure):
    if not figure.countable:
        pytest.skip(f'{figure.needs} is not installed')
    number = figure.count()
    assert figure.holds(number), f'{number}, where the ceiling is {figure.ceiling}'


def git(*words):
    command = ['git', '-c', 'safe.directory=*', *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def figures_of(source):
    """The figures of another version of the script; none before they had targets."""
    module = types.ModuleType('earlier_house')
    module.__file__ = str(ROOT / 'scripts' / 'house.py')
    if 'target: int' not in source:
        return ()
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, module.__file__, 'exec'), vars(module))
    finally:
        del sys.modules[module.__name__]
    return module.FIGURES


def raised(earlier, figures):
    """The names of figures whose ceiling is looser than an earlier one, or that are gone."""
    now = {figure.name: figure for figure in figures}
    return [
        old.name
        for old in earlier
        if old.name not in now
        or not old.holds(now[old.name].ceiling)
        or old.target != now[old.name].target
    ]


def test_a_ceiling_only_falls():
    """Against the last commits that touched the script."""
    if shutil.which('git') is None or not (ROOT / '.git').exists():
        pytest.skip('not a checkout of git: there are no earlier ceilings')
    for commit in git('log', f'-{COMMITS}', '--format=%h', '--', 'scripts/house.py').split():
        earlier = figures_of(git('show', f'{commit}:scripts/house.py'))
        assert raised(earlier, house.FIGURES) == [], f'ceilings that commit {commit} had lower'


def test_a_rise_is_seen():
    by_name = {figure.name: figure for figure in house.FIGURES}
    lines, median = by_name['lines of the package'], by_name['median lines of a file']
    looser = lines._replace(ceiling=lines.ceiling + 1), median._replace(ceiling=median.ceiling - 1)
    tighter = lines._replace(ceiling=lines.ceiling - 1), median._replace(ceiling=median.ceiling + 1)
    assert raised((lines, median), looser) == [lines.name, median.name]
    assert raised((lines, median), tighter) == []
    assert raised((lines, median), (lines,)) == [median.name]
    assert raised((lines,), (lines._replace(target=lines.target + 1),)) == [lines.name]
    assert figures_of('class Figure: ceiling: int') == ()
    source = (ROOT / 'scripts' / 'house.py').read_text()
    assert raised(figures_of(source), house.FIGURES) == []


def test_the_page_has_the_ceilings(monkeypatch, capsys):
    """And the command that counts prints a line for each figure, with what was counted."""
    page = (ROOT / 'docs' / 'architecture.md').read_text()
    rows = re.findall(r'^\| .+ \| [\d,]+ \| ([\d,]+) \| ([\d,]+) \|$', page, re.M)
    assert rows == [(f'{each.ceiling:,}', f'{each.target:,}') for each in house.FIGURES]
    counted = [each._replace(count=lambda at=at: at) for at, each in enumerate(house.FIGURES)]
    monkeypatch.setattr(house, 'FIGURES', counted)
    monkeypatch.setattr(sys, 'argv', ['house.py'])
    house.main()
    _, *printed = capsys.readouterr().out.splitlines()
    assert [line.split('  ')[0] for line in printed] == [each.name for each in counted]
    numbers = [str(at) if each.countable else '-' for at, each in enumerate(counted)]
    assert [line.split()[-3] for line in printed] == numbers


def test_pages_named_by_a_date_do_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(house, 'DOCS', tmp_path)
    (tmp_path / 'results').mkdir()
    for name in 'index.md', 'results/README.md', 'results/2026-11-27-GPU-2.md', 'picture.png':
        (tmp_path / name).touch()
    assert house.pages() == 2


def test_what_is_counted(monkeypatch, tmp_path):
    """In code, not in comments and docstrings; a technique's own folder and tables do not count."""
    monkeypatch.setattr(house, 'PACKAGE', tmp_path)
    house._tree.cache_clear()
    for room in 'techniques', 'ir', 'mcore', 'cli':
        (tmp_path / room).mkdir()
    reader = '"""What it is."""\nname = placement.first_route\n'
    (tmp_path / 'one.py').write_text('offloaded = 1\n' + reader)
    (tmp_path / 'two.py').write_text('# offload\ntext = "recompute"\n')
    (tmp_path / 'rules.py').write_text('offload = 1\n')
    (tmp_path / 'techniques' / 'offload.py').write_text('def offload():\n    "Whether so."\n')
    (tmp_path / 'ir' / 'placement.py').write_text(reader)
    (tmp_path / 'cli' / 'plan.py').write_text('def f(args: argparse.Namespace): ...\n')
    stages = 'ModelStage: ...', 'Sliced(stages.ModelStage): ...', 'Both(Sliced): ...'
    stages = ''.join(f'class {each}\n' for each in stages)
    (tmp_path / 'mcore' / 'stages.py').write_text(stages)
    used = (
        '\n\ndef _used(x):\n    """Return what it is."""\n    return x\n\n\ny = _used(_used(1))\n'
    )
    (tmp_path / 'four.py').write_text('def _once(x):\n    """Add."""\n    return x + 1\n' + used)
    assert house.package_files() == 8
    assert house.package_lines() == 3 + 2 + 1 + 2 + 2 + 1 + 3 + 11
    assert house.median_lines() == 2
    assert house.mcore_lines() == 3
    assert house.technique_files('offload') == 1
    assert house.technique_files('recompute') == 1, 'a setting is named by a string'
    assert house.technique_files('updates') == 0
    assert house.namespace_functions() == 1
    assert house.stage_classes() == 3
    assert house.tiny_functions() == 2, 'f and _once; _used is used twice, offload has no body'
    assert house.first_route_readers() == 1
    assert house.riddles() == 3, 'a string behind code is none'
    house._tree.cache_clear()
