"""Our flags in Megatron's own command line: added to a parser, read as a request, resolved.

They are added to NVIDIA's parser from inside. What they ask for is resolved right after parsing,
before Megatron looks at its arguments, and the plugin is enabled. Flags of other forks are
understood, with a word on which flag to use instead.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_zbpp.mcore import enabled
from megatron_zbpp.mcore.options import Checks, Option, Problems, problems_of
from megatron_zbpp.mcore.patches.registry import Patch, Registry
from megatron_zbpp.mcore.settings import BY_FLAG, OPTIONS, Request
from megatron_zbpp.runtime.log import job_log

FLAGS = [each for option in OPTIONS.values() for each in option.flags]
_V_SCHEDULES = {'zb': 'zb-v', 'half': 'v-half', 'min': 'v-min'}
_OF_SCHEDULE = {'pipeline_schedule', 'pipeline_schedule_file'}
_LIMIT = '--zero-bubble-max-pending-backward'
_MEASURED = '--pipeline-offload auto measures how long copies take'
_OWN_ORDER = (
    'a schedule has its own order of microbatches; gis and gis-h have groups of the size that '
    'takes least memory'
)
_ITERATIONS = 'see --pipeline-schedule-profile-iters'
# flags of other forks: the unit of the value (empty: a switch), and why some have no effect
_ALIASES = {
    '--enable-zero-bubble': ('', ''),
    '--zero-bubble-v-schedule': ('', ''),
    '--zero-bubble-v-schedule-mem-setup': ('|'.join(_V_SCHEDULES), ''),
    _LIMIT: ('A', ''),
    '--enable-1f1b-v': ('', ''),
    '--enable-zbh1-pipeline': ('', ''),
    '--offload-chunk-num': ('N', ''),
    '--offload-time': ('K', _MEASURED),
    '--auto-offload-time': ('', _MEASURED),
    '--enable-zb-runtime': ('', 'every --pipeline-schedule has its runtime'),
    '--interleave-group-size': ('N', _OWN_ORDER),
    '--allow-padding-num-layers': ('', 'layers need not divide among the stages'),
    '--enable-exactly-numeric-match': ('', 'all numbers match exactly, always'),
    '--zero-bubble-pipeline-timers-start-iter': ('N', _ITERATIONS),
    '--zero-bubble-pipeline-timers-end-iter': ('N', _ITERATIONS),
}
_OURS = '_with_our_flags'  # on a function: it adds our flags already
has_run = False  # whether Megatron has read its command line in this process
_PACKAGES = {'yaml': 'pyyaml', 'PIL': 'pillow'}  # of modules with other names


def flag(name: str) -> str:
    """Return the flag that sets the argument of that name."""
    return '--' + name.replace('_', '-')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one group for our flags, and one for what other forks call them."""
    group = parser.add_argument_group(
        'pipeline schedule (megatron_zbpp)', "Without a schedule, everything is Megatron's own."
    )
    for each in FLAGS:
        if not each.unit:
            group.add_argument(each.name, action='store_true', help=each.text)
            continue
        default = each.shown_default and f' Default: {each.shown_default}.'
        group.add_argument(
            each.name,
            type=str if each.least is None else functools.partial(_number_or_text, each),
            default=each.flag_default,
            metavar=each.unit,
            help=each.text + default,
        )
    aliases = parser.add_argument_group('pipeline schedule: names of other forks, deprecated')
    for alias, (unit, _) in _ALIASES.items():  # what is not given leaves nothing in Megatron's list
        more: dict[str, Any] = {'metavar': unit} if unit else {'action': 'store_true'}
        more = {'choices': list(_V_SCHEDULES)} if '|' in unit else more
        text = 'says what to use instead'
        aliases.add_argument(alias, help=text, default=argparse.SUPPRESS, **more)


def _number_or_text(option: Option, text: str) -> float | str:
    try:
        return int(text) if isinstance(option.least, int) else float(text)
    except ValueError:
        return text


def read(args: Mapping[str, Any]) -> Request | None:
    """Return the request of our flags and of translated ones of other forks; None: no flag."""
    values = {each.dest: args[each.dest] for each in FLAGS}
    translated = _translated(args)
    for name, value in translated.items():
        if values[name] not in (None, value):
            raise ValueError(
                f'{flag(name)} {values[name]} and a flag that means {value}: give one of them'
            )
    if translated:
        instead = ' '.join(f'{flag(name)} {value}' for name, value in translated.items())
        job_log.warning(f'deprecated flags: use {instead}')
    for alias, (_, why) in _ALIASES.items():
        if why and args.get(alias[2:].replace('-', '_')):
            job_log.warning(f'{alias} has no effect: {why}')
    values |= translated
    schedule, file = values['pipeline_schedule'], values['pipeline_schedule_file']
    if schedule is None and file is None:
        unset = {each.dest: each.flag_default if each.unit else False for each in FLAGS}
        if idle := [each.name for each in FLAGS if values[each.dest] != unset[each.dest]]:
            are = 'are' if len(idle) > 1 else 'is'
            raise ValueError(f'{", ".join(idle)} {are} about a --pipeline-schedule: give that, too')
        return None
    if None not in (schedule, file):
        raise ValueError(
            f'--pipeline-schedule {schedule} and --pipeline-schedule-file {file}: give one of them'
        )
    checks = Checks()
    for part in (each for option in OPTIONS.values() for each in option.parts):
        with checks.one(''):
            values[part.dest], given = part.flag_default, values[part.dest]
            part.require(given, part.name)
            values[part.dest] = given
    on, off = values['pipeline_prewarm'], values['no_pipeline_prewarm']
    with checks.one('prewarm'):
        if on and off:
            raise ValueError('--pipeline-prewarm and --no-pipeline-prewarm: give one of them')
    early, steps = 'enable_optimizer_post_validation', 'optimizer_post_validation_clean_steps'
    options = {name: values[each.dest] for name, each in OPTIONS.items() if each.flag}
    options |= {
        'schedule': schedule,
        'post_validation': values[early] and values[steps],
        'same_start': not values['no_pipeline_same_start'],
        'prewarm': None if on == off else on,
        'flags': {**args},
    }
    return Request(options, BY_FLAG, file, tuple(checks.problems))


def _translated(args: Mapping[str, Any]) -> dict[str, Any]:
    given = args.get
    setup = given('zero_bubble_v_schedule_mem_setup')
    limit, chunks = given('zero_bubble_max_pending_backward'), given('offload_chunk_num')
    offload = {} if chunks is None else {'pipeline_offload': chunks}
    meant = {
        '1f1b-v': given('enable_1f1b_v'),
        'zb-h1': given('enable_zbh1_pipeline'),
        _V_SCHEDULES[setup or 'zb']: given('zero_bubble_v_schedule') or setup,
    }
    names = [name for name, asked in meant.items() if asked]
    if len(names) > 1:
        raise ValueError(f'flags that mean {" and ".join(names)}: give --pipeline-schedule instead')
    if names or not given('enable_zero_bubble'):
        if limit is not None:
            job_log.warning(
                f'{_LIMIT} {limit} has no effect: it is a limit for --enable-zero-bubble alone'
            )
        return ({'pipeline_schedule': names[0]} if names else {}) | offload
    if limit in (None, 'auto'):
        return {'pipeline_schedule': 'zb-1p'} | offload
    try:
        within = {'pipeline_schedule_memory_limit': float(limit)}
    except ValueError:
        raise ValueError(f'{_LIMIT} {limit}: give a number, or auto') from None
    return {'pipeline_schedule': 'zb-1p'} | within | offload


def parse(
    parser: argparse.ArgumentParser,  # knows the flags, without abbreviations
    parse_known_args: Callable[..., tuple[argparse.Namespace, list[str]]],  # its method
    words: Sequence[str],  # flags and their values
    namespace: argparse.Namespace | None = None,  # that is filled; None: a new one
    where: str = '',  # what an error of argparse begins with
) -> tuple[argparse.Namespace, list[str], Checks]:
    """Return arguments, words that the parser does not know, and checks with what is wrong.

    A flag that is wrong is taken out. Where some are, the values of our own flags are checked, too:
    nothing else can be said then.
    """
    parser.exit_on_error = False
    checks, left = Checks(), list(words)
    while True:
        try:
            args, unknown = parse_known_args(left, namespace)
            break
        except argparse.ArgumentError as error:
            with checks.one(''):
                raise ValueError(f'{where}{error}') from error
            names = [name[2:] for name in (error.argument_name or '').split('/')]
            shorter = list(without(left, names, ()))
            if len(shorter) == len(left):
                checks.require_all(BY_FLAG)
            left = shorter
    if checks.problems and not (names_in(words) - names_in(left)) & _OF_SCHEDULE:
        from megatron_zbpp.mcore.job.resolve import Facts, resolve  # takes torch and Megatron

        with checks.one(''):
            request = read(vars(args))
            if request is not None:
                resolve(request, Facts()).require()
    return args, unknown, checks


def names_in(words: Iterable[str]) -> set[str]:
    """Return the names of the arguments whose flags are among words."""
    flags = (word.partition('=')[0] for word in words if word.startswith('--'))
    return {name[2:].replace('-', '_') for name in flags}


def without(words: Iterable[str], valued: Iterable[str], switches: Iterable[str]) -> Iterator[str]:
    """Yield words without these flags, and without the values behind the first kind."""
    valued, switches = {f'--{name}' for name in valued}, set(switches)
    dropping = False
    for word in words:
        if word.startswith('--'):
            name = word.partition('=')[0]
            dropping = name in valued
            if dropping or name in switches:
                continue
        elif dropping:
            continue
        yield word


def refuse(message: str) -> None:
    """Tell the user once a host why the job ends, and torchrun, whose own last lines repeat it.

    Once a host, as a file may be missing on one of them only.
    """
    if int(os.environ.get('LOCAL_RANK', 0)) == 0:
        print(message, file=sys.stderr, flush=True)
    file = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if file:
        Path(file).write_text(json.dumps({'message': message, 'timestamp': int(time.time())}))


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
        add_arguments(parser)
        parser.parse_known_args = _preparing(parser)
        return parser

    setattr(add_megatron_arguments, _OURS, True)
    return add_megatron_arguments


def _make_printable(parser: argparse.ArgumentParser) -> None:
    """Double percent signs that argparse cannot format: Megatron-Core from 0.18 on has one."""
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
            parsed, unknown, checks = parse(parser, original, words, namespace)
            checks.require_all(BY_FLAG)
            prepare(parsed)
        except (OSError, ValueError, NotImplementedError) as error:
            told = Problems(problems_of(error, ''), BY_FLAG)
            hint = ' (`zbpp check` shows the place)' if told.drawn else ''
            script = Path(sys.argv[0]).name
            refuse('\n'.join(f'{script}: error: {line}{hint}' for line in told.lines))
            raise SystemExit(2) from None
        return parsed, unknown

    return parse_known_args


def prepare(args: argparse.Namespace) -> None:
    """Do what the flags ask for, and write it into `args`, not validated yet."""
    request = read(vars(args))
    if request is None:
        return
    from megatron_zbpp.mcore.job.resolve import Facts, resolve  # takes torch and Megatron

    job = resolve(request, Facts.here(args, names_in(sys.argv), enabled.programs_of))
    job.require()
    if job.programs is None:
        job_log.warning(job.notes[0])
        return
    before = enabled.plugin  # Megatron's loop parses its arguments twice from 0.19 on
    assert job.settings is not None
    plugin = enabled.switch(job.settings, job.programs, BY_FLAG)
    for note in job.notes if plugin is not before else ():
        job_log.info(note)
    vars(args).update(job.writes)
