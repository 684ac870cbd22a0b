"""`zbpp doctor`: what is installed, whether our patches fit it, what a launch line would run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_zbpp.version import __version__

if TYPE_CHECKING:
    from megatron_zbpp.launch.dry_run import DryRun

_CPU = 'CPU'
_PACKAGES = ('torch', 'megatron-core', 'transformer-engine', 'apex', 'pybind11')


@dataclass(frozen=True)
class Patch:
    """Something of Megatron's that is replaced."""

    target: str  # its full name
    problem: str = ''  # why that has no effect in the installed release; empty: it has


@dataclass(frozen=True)
class Report:
    """All that the doctor found."""

    versions: dict[str, str]  # of what takes part, by its name
    patches: tuple[Patch, ...]  # what is replaced while the plugin is enabled
    dry_run: DryRun | None = None  # what the launch line would run; None: there was none
    missing: str = ''  # the script of the launch line, where it is not here

    @property
    def fine(self) -> bool:
        refused = self.dry_run is not None and self.dry_run.refused
        return not (refused or self.missing) and not any(patch.problem for patch in self.patches)

    def to_dict(self) -> dict[str, Any]:
        return {
            'fine': self.fine,
            'versions': self.versions,
            'patches': [asdict(patch) for patch in self.patches],
            'launch_line': None if self.dry_run is None else self.dry_run.to_dict(),
            'missing_script': self.missing,
        }


def examine(
    words: Sequence[str] = (),  # of the launch line: see `launch_line.read`
    gpus: int | None = None,  # processes of the job
    now: Callable[[str], None] = lambda text: None,  # told what is looked at
    rates: Mapping[str, Any] = {},  # of the machine, see `LinePrediction.of`
) -> Report:
    """Look at the installation, and at a launch line if there is one."""
    dry_run, missing = None, ''
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # Megatron's, about packages that it lacks
        now('importing Megatron ...')
        device = prepare(words)
        if words:
            now('reading the launch line ...')
            from megatron_zbpp.launch import launch_line
            from megatron_zbpp.launch.dry_run import dry_run_of

            line = launch_line.read(words, gpus)
            dry_run = dry_run_of(line, rates)
            missing = line.script if line.script and not Path(line.script).is_file() else ''
        now('looking for what the patches replace ...')
        return Report(versions() | {'device': device}, tuple(patches()), dry_run, missing)


def prepare(words: Sequence[str]) -> str:
    """Make the megatron that a launch line would use importable, and return the device."""
    device = _device()
    if device == _CPU:
        from megatron_zbpp.emulation import cpu

        cpu.install()
    for script in (Path(word) for word in words if word.endswith('.py')):  # its own comes first
        folder = str(script.resolve().parent)
        if script.is_file() and folder not in sys.path:
            sys.path.insert(0, folder)
    return device


def versions() -> dict[str, str]:
    found = {'megatron_zbpp': __version__, 'python': platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = 'not installed'
    if _origin('megatron.core'):
        from megatron.core import package_info

        found['megatron-core'] = f'{package_info.__version__} in {_origin("megatron.core")}'
    found['megatron.training'] = _origin('megatron.training') or (
        'not found: in the wheels of megatron-core from 0.17 on, or in a checkout of Megatron-LM'
    )
    return found


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return spec and next(iter(spec.submodule_search_locations or ()), None)


def _device() -> str:
    try:
        import torch
    except ImportError:
        return 'unknown: torch is not installed'
    from megatron_zbpp.emulation import cpu

    if cpu.installed() or not torch.cuda.is_available():
        return _CPU
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    return f'{count} x {name}, CUDA {torch.version.cuda}'


def patches() -> Iterator[Patch]:
    """Return everything that the plugin replaces, tried out and taken back."""
    try:
        from megatron_zbpp.mcore.patches.registry import Registry
        from megatron_zbpp.mcore.plugin import Plugin
        from megatron_zbpp.mcore.settings import Settings
    except (ImportError, AttributeError) as error:
        yield Patch('megatron.core', str(error))
        return
    known = [p for p in Plugin(Settings('zb-v', post_validation=True)).patches() if not p.waits]
    if moved := [Patch(p.target, problem) for p in known if (problem := p.problem())]:
        yield from moved
        return
    registry = Registry()
    registry.install(known)
    replaced, problems = registry.places(), dict[int, str]()
    try:
        for place, (owner, name, original) in enumerate(replaced):
            if getattr(owner, name) is original:
                problems[place] = 'it was not replaced'
    finally:
        registry.undo()
    for place, (owner, name, original) in enumerate(replaced):
        if getattr(owner, name) is not original:
            problems[place] = 'it was not put back'
        home = f'{owner.__module__}.' if isinstance(owner, type) else ''
        own = getattr(owner, '__qualname__', owner.__name__)
        yield Patch(f'{home}{own}.{name}', problems.get(place, ''))


def text_of(report: Report, verbose: bool = False) -> str:
    """Return the report for people: what was asked for comes first."""
    lines = [] if report.dry_run is None else [*report.dry_run.lines(), '']
    if report.missing:
        cure = 'correct its path, or give the flags behind it alone'
        lines.insert(0, f'refused: there is no script {report.missing}: {cure}')
    if verbose or report.dry_run is None:
        width = max(map(len, report.versions))
        lines += [f'{name:{width}}  {version}' for name, version in report.versions.items()]
    else:
        found = (f'{name} {version}' for name, version in report.versions.items())
        lines.append(', '.join(text for text in found if ' not ' not in text))
    failed = [patch for patch in report.patches if patch.problem]
    state = f'{len(failed)} without effect' if failed else 'all take effect'
    hint = '' if verbose else ' (--verbose lists them)'
    lines.append(f'patches: {len(report.patches)}, {state}{hint}')
    listed = report.patches if verbose else failed
    lines += [f'  {p.target}' + (f': {p.problem}' if p.problem else '') for p in listed]
    return '\n'.join(lines)
