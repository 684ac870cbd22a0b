"""The `zbpp` command line: parses, calls a command with the options it reads, reports errors.

Bad input ends with one line on stderr and exit code 2; a schedule that is refused is also drawn on
stdout, with the offending cell marked.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_zbpp.analysis.checker import ScheduleError
from megatron_zbpp.cli import (
    advising,
    benching,
    commands,
    comparing,
    partitioning,
    planning,
    printing,
    profiling,
)
from megatron_zbpp.cli.arguments import AGAINST, add_case, add_options, add_vocabulary, case_request
from megatron_zbpp.ir.strict_json import printable
from megatron_zbpp.mcore.options import Problems
from megatron_zbpp.planner.figures import FORMATS
from megatron_zbpp.version import __version__

# Commands whose numbers, if they take any, are no times.
_TIMELESS = frozenset('list check doctor bench partition profile advise page'.split())
# Commands that print tables.
_TABULAR = set('list simulate compare plan partition profile bubbles freeze bench advise'.split())
_ALONE = ('-h', '--help', '--version')  # take no command

_EXAMPLES = """
zbpp list                                              common schedules, their bubble and memory
zbpp list --all                                        every schedule
zbpp list --pp 8 --microbatches 24 --table md          with gains over 1F1B at that size
zbpp show --schedule zb-v --pp 4 --microbatches 8      draw it here
zbpp simulate --schedule zb-1p --pp 8 --microbatches 24 --times 18.5,18.1,9.3 --comm 0.6
zbpp simulate --schedule dualpipe-v --pp 8 --microbatches 24 --together 0.85
zbpp simulate --schedule po --pp 8 --microbatches 24 --offload half --copy-ratio 0.8
zbpp simulate --schedule zb-v --pp 8 --microbatches 4 --slices 4
zbpp simulate --schedule zb-v --pp 8 --microbatches 24 --vocab-parallel 0.3
zbpp compare --pp 8 --microbatches 24 --times 1,1.2,0.8 -o compare.html
zbpp compare --pp 8 --microbatches 24 --table latex     also md and csv; all facts: --json
zbpp compare --layers-file layers.json --pp 8 --microbatches 24 --latencies 0,1,4 --csv rows.csv
zbpp plan --pp 8 --microbatches 24 --times 1,1.2,0.8 --memory-limit 8 --num-layers 32 -o plan.json
zbpp plan --pp 8 --microbatches 24 --memory-limit 3 --actions offload --copy-ratio 0.8 -o plan.json
zbpp plan --pp 8 --microbatches 24 --times 1,1.2,0.8 --frontier 3,4,5,6,7,8 --seconds 60
zbpp profile --model gpt --num-layers 24 --hidden 768 --heads 12 --vocab 50257 --seq 512 --tflops 80
zbpp profile trace -o layers.json                      of --pipeline-trace-dir trace
zbpp profile job.log -o layers.json                    of --timing-log-level 2
zbpp profile rank0.json.gz rank1.json.gz --layout 'Ett|ttL' --write-times times.json
zbpp profile report.sqlite --layout 'Ett|ttL' -o layers.json
zbpp profile --stages 'Ett|tt|ttL=times.json' -o layers.json
zbpp partition layers.json --pp 4 --microbatches 8 -o plan.json
zbpp partition layers.json --devices devices.json --microbatches 8 --memory-limit 60GiB
zbpp partition layers.json --pp 4 --microbatches 8 --placements loop --exact
zbpp bubbles --schedule 1f1b --pp 4 --microbatches 8 --json
zbpp freeze --schedule zb-h1 --pp 4 --microbatches 8 --most 0.5
zbpp doctor -- torchrun -m megatron_zbpp.launch pretrain_gpt.py --pipeline-schedule zb-v ...
zbpp bench -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
zbpp advise --gpus 64 --memory 80GiB --tflops 245 --vocab 51200 -- torchrun pretrain_gpt.py ...
zbpp page -o planner.html                              sliders, timelines and gains in a browser
zbpp page --pp 8 --microbatches 24,48 --vpp 2,4 -o planner.html
zbpp check plan.json                                   ours, a plan's or torch's CSV
zbpp convert --file plan.json --to torch-csv -o plan.csv
zbpp convert --schedule zb-v --pp 4 --microbatches 8 -o zb-v.html
"""

_TEXTS: dict[str, str] = {
    line.split()[0]: line.split(maxsplit=1)[1]
    for line in """\
doctor     what is installed, and what a job would run
bench      your launch line by stock's schedule and by ours: time, memory, losses
advise     the fastest sizes, schedule and recomputation that fit, with launch lines
list       schedules, each with its bubble, peak memory and gain
show       draw a schedule as text, to scale
compare    a table, and a picture, of many schedules
simulate   makespan, window, bubbles, peak memory
page       a page with sliders to compare schedules
plan       search the best schedule for given costs
partition  which layers on which rank and device, and the schedule for that
profile    costs of layers, from a shape, a trace, a log or times of stages
check      prove that a file holds a schedule that can run
convert    write a schedule in another format
bubbles    when each rank waits, and between which passes
freeze     weight gradients to leave out for a shorter batch
""".splitlines()
}

_TIMES = """
Times are of one full rank, in any unit: a chunk of v takes a v-th of each. Stages that differ go
into a file {"F": [...], "B": [...], "W": [...]}, one entry per stage in model order."""
_MEMORY = """
Memory is in activations of one microbatch on a full rank.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    if not given:
        _parser().print_help()
        return 0
    options: dict[str, Any] = {}
    status = None
    try:
        _require_command(given[0])
        options = vars(_parser().parse_args(given))
        with warnings.catch_warnings():
            warnings.showwarning = _note
            with printing.alone(options.get('table')):
                status = _run(options.pop('run'), options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print('zbpp: interrupted', file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ScheduleError as error:
        return commands.refuse(error, options['as_json'])
    except OSError as error:
        where = error.filename or options.get('output') or 'stdout'  # a full disk has none
        cure = '' if ': give ' in (error.strerror or '') else ': give another path'
        return _complain(f'{where}: {error.strerror}{cure}')
    except ModuleNotFoundError as error:
        package = (error.name or '').partition('.')[0]
        cure = f': pip install {package}, or run zbpp where the job runs' if package else ''
        return _complain(f'{error}{cure}')
    except Problems as error:
        return max(map(_complain, error.lines))
    except (ValueError, ImportError) as error:
        return _complain(str(error))
    return status or 0


def _run(command: Callable[..., int | None], options: Mapping[str, Any]) -> int | None:
    """Call a command with the options that it has arguments for; `request` is made of all."""
    wanted = inspect.signature(command).parameters
    if any(each.kind is each.VAR_KEYWORD for each in wanted.values()):
        return command(**options)
    given = {**options, 'request': case_request(options)} if 'request' in wanted else options
    return command(**{name: given[name] for name in wanted})


def _require_command(first: str) -> None:
    """Raise ValueError where the first word is neither a command nor an option before one."""
    known = [name for name, *_ in _COMMANDS]
    if first in known or first in _ALONE or first.startswith('--print-completion'):
        return
    if first.startswith('-'):
        cure = f'a command comes first: zbpp show {first} ..., or zbpp --help'
    else:
        near = difflib.get_close_matches(first, known, n=1)
        cure = f'did you mean {near[0]!r}?' if near else f'there are {", ".join(known)}'
    raise ValueError(f'{first!r} is no command: {cure}')


def _complain(text: str) -> int:
    print(f'zbpp: {printable(" ".join(text.split()))}', file=sys.stderr)
    return 2


def _note(message: Warning | str, _: object, file: str, *__: object) -> None:
    if '/megatron/' in file and '/megatron_zbpp/' not in file:
        return  # Megatron's, about packages that it lacks
    print(f'zbpp: note: {printable(str(message))}', file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """One whose errors take one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'{self.prog}: {printable(message)} (see {self.prog} --help)\n')


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with headings above groups of commands."""

    def _format_action(self, action: argparse.Action) -> str:
        heading = '' if action.option_strings else _HEADINGS.get(action.dest)
        return f'\n  {heading}:\n' * bool(heading) + super()._format_action(action)


class _Completion(argparse.Action):
    def __call__(self, parser: Any, _: object, shell: Any, *__: object) -> None:
        try:
            import shtab
        except ImportError:
            parser.error(f'--print-completion {shell} needs shtab: pip install shtab')
        print(shtab.complete(parser, shell))
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog='zbpp',
        description='Zero-bubble pipeline schedules for Megatron: try, compare and plan them.',
        epilog=_epilog(''),
        formatter_class=_Help,
    )
    parser.add_argument('--version', action='version', version=f'zbpp {__version__}')
    parser.add_argument(
        '--print-completion',
        action=_Completion,
        choices=('bash', 'zsh', 'tcsh'),
        help='print what makes this shell complete commands and options',
    )
    subparsers = parser.add_subparsers(title='commands', required=True, metavar='COMMAND')
    for name, run, *additions in _COMMANDS:
        text = _TEXTS[name]
        command = subparsers.add_parser(
            name,
            help=text,
            description=f'{text[0].upper()}{text[1:]}.',
            epilog=_epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        prints = command.add_mutually_exclusive_group()
        add_options(prints, '--json  switch as as_json  print one JSON object')
        if name in _TABULAR:
            text = 'print the table alone: Markdown, CSV, LaTeX, or as it is'
            prints.add_argument('--table', choices=[*FORMATS], help=text)
        for add in additions:
            add_options(command, add) if isinstance(add, str) else add(command)
    return parser


# Name, function, and its options, as tables or by what adds them, in the order of `zbpp --help`.
_COMMANDS: tuple[tuple[Any, ...], ...] = (
    ('doctor', commands.doctor, commands.GPUS, advising.RATES, advising.LINKS, commands.DOCTOR),
    ('bench', benching.bench, benching.BENCH),
    ('advise', advising.print_advice, advising.add_advise),
    ('list', commands.list_families, commands.LIST, AGAINST),
    ('show', commands.show, add_case, commands.SHOW, AGAINST, add_vocabulary),
    ('compare', comparing.compare, comparing.add_compare),
    ('simulate', commands.simulate_case, add_case, commands.add_simulate),
    ('page', commands.write_page, commands.add_page),
    ('plan', planning.plan_schedule, planning.add_planning),
    ('partition', partitioning.partition_layers, partitioning.add_partition),
    ('profile', profiling.profile, profiling.add_profile),
    ('check', commands.check_file, commands.CHECK),
    ('convert', commands.convert, add_case, commands.add_convert),
    ('bubbles', commands.bubbles, add_case, commands.BUBBLES),
    ('freeze', commands.freeze_schedule, add_case, commands.FREEZE),
)
# Headings of `zbpp --help`, by the command that each stands above.
_HEADINGS = {
    'doctor': 'your training job',
    'list': 'schedules',
    'plan': 'searches, and costs for them',
    'check': 'files and details',
}
_SHOWN_FIRST = ('doctor', 'bench', 'advise', 'list', 'compare')  # with their first examples


def _epilog(name: str) -> str:
    """Return examples of a command and the meaning of its numbers; of none, the first examples."""
    every = [line for line in _EXAMPLES.splitlines() if line]
    if not name:
        first = [next(e for e in every if e.split()[1] == known) for known in _SHOWN_FIRST]
        more = ['', 'options, units and more examples: zbpp COMMAND --help']
        return '\n'.join(['examples:', *(f'  {line}' for line in first), *more])
    units = [] if name in _TIMELESS else [_TIMES]
    units += [] if name in _TIMELESS - {'check'} else [_MEMORY]
    return '\n'.join(['examples:', *(f'  {e}' for e in every if e.split()[1] == name), *units])
