"""Our flags in Megatron's own command line, of `megatron.training`.

They are added to NVIDIA's parser from inside. What they ask for is resolved right after parsing,
before Megatron looks at its arguments, and the plugin is enabled.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_zbpp.launch import flags
from megatron_zbpp.mcore import enabled
from megatron_zbpp.mcore.job.resolve import Facts, resolve
from megatron_zbpp.mcore.options import Problems, problems_of
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.plugin import Plugin
from megatron_zbpp.mcore.settings import BY_FLAG
from megatron_zbpp.runtime.log import job_log

_OURS = '_with_our_flags'  # on a function: it adds our flags already
has_run = False  # whether Megatron has read its command line in this process
_PACKAGES = {'yaml': 'pyyaml', 'PIL': 'pillow'}  # of modules with other names


def install() -> None:
    """Add our flags to the command line of `megatron.training`; again does nothing more."""
    module = 'megatron.training.arguments'
    require_packages(module)
    name, users = 'add_megatron_arguments', (f'{module}:parse_args',)
    patch = Patch(module, name, _with_our_flags, users)
    if problem := patch.problem():
        raise RuntimeError(
            f'{problem}: our flags would be unknown; call megatron_zbpp.enable() in the script '
            'instead'
        )
    if not getattr(getattr(patch.find_owner(), name), _OURS, False):
        Registry().install([patch])


def require_packages(module: str) -> None:
    """Check that an optional module of Megatron, if present, can be imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or 'megatron').partition('.')[0]
        if package != 'megatron':
            cure = f'pip install {_PACKAGES.get(package, package)}'
            raise RuntimeError(f'{error}, which {module} imports: {cure}') from error


def lacks_compiler() -> str:
    """Return why Megatron's loop would not compile its helpers for data; empty: it would, or has.

    Rank 0 runs their Makefile, and so the python3 of the PATH, whichever runs the job.
    """
    if importlib.util.find_spec('megatron.core.datasets.helpers_cpp'):
        return ''
    (folder,) = importlib.import_module('megatron.core.datasets').__path__
    if not Path(folder, 'Makefile').is_file():
        return ''
    asked = 'python3 -m pybind11 --includes'  # as the Makefile does
    if subprocess.run(asked, shell=True, capture_output=True).returncode == 0:
        return ''
    return (
        'python3 has no pybind11, with which Megatron compiles its helpers for data: python3 -m '
        'pip install pybind11'
    )


def _with_our_flags(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        _make_printable(parser)
        flags.add_arguments(parser)
        parser.parse_known_args = _preparing(parser)
        return parser

    setattr(add_megatron_arguments, _OURS, True)
    return add_megatron_arguments


def _make_printable(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of texts that argparse cannot format.

    Megatron-Core 0.18 and later have one, so that their --help ends in a traceback.
    """
    for action in parser._actions:
        text = action.help or ''
        try:
            if '%' in text:
                parser._get_formatter()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = text.replace('%', '%%')


def _preparing(parser: argparse.ArgumentParser) -> Callable:
    """`parse`, and then `prepare`; a value that makes no sense ends the program with status 2."""
    original = parser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        global has_run
        has_run = True
        try:
            words = sys.argv[1:] if args is None else args
            parsed, unknown, checks = flags.parse(parser, original, words, namespace)
            checks.require_all(BY_FLAG)
            prepare(parsed)
        except (OSError, ValueError, NotImplementedError) as error:
            told = Problems(problems_of(error, ''), BY_FLAG)
            hint = ' (`zbpp check` shows the place)' if told.drawn else ''
            script = Path(sys.argv[0]).name
            flags.refuse('\n'.join(f'{script}: error: {line}{hint}' for line in told.lines))
            raise SystemExit(2) from None
        return parsed, unknown

    return parse_known_args


def prepare(args: argparse.Namespace) -> Plugin | None:
    """Do what the flags ask for, and write it into `args`, not validated yet; None: nothing."""
    request = flags.read(vars(args))
    if request is None:
        return None
    job = resolve(request, Facts.here(args, flags.names_in(sys.argv), enabled.programs_of))
    job.require()
    if job.programs is None:
        job_log.warning(job.notes[0])
        return None
    before = enabled.plugin  # Megatron's loop parses its arguments twice from 0.19 on
    assert job.settings is not None
    plugin = enabled.switch(job.settings, job.programs, BY_FLAG)
    for note in job.notes if plugin is not before else ():
        job_log.info(note)
    vars(args).update(job.writes)
    return plugin
