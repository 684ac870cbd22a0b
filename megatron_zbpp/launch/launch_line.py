"""Launch lines: read without starting the job and checked, and those of a bench with their log.

They are read by Megatron's own parser with `megatron.training` at hand; else only what concerns us:
our flags, the sizes and the parallelism.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron_zbpp.emulation import cpu_flags
from megatron_zbpp.launch.flags import FLAGS, add_arguments, flag, parse, require_packages, without
from megatron_zbpp.mcore.job import rules
from megatron_zbpp.mcore.job.sizes import Sizes
from megatron_zbpp.mcore.settings import BY_FLAG
from megatron_zbpp.mcore.training_log import DRAWING

TRAINING = 'megatron.training.arguments'
# How like a flag of ours, or of Megatron's, a word must be to be taken for it.
_OURS, _THEIRS = 0.85, 0.8
# Megatron's flags that say how many layers, ranks and microbatches there are
_NUMBERS = (
    'num_layers tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size '
    'expert_model_parallel_size num_layers_per_virtual_pipeline_stage '
    'num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers '
    'decoder_last_pipeline_num_layers micro_batch_size global_batch_size eval_global_batch_size '
    'eval_micro_batch_size eval_iters hidden_size ffn_hidden_size num_attention_heads '
    'num_query_groups kv_channels num_experts seq_length expert_tensor_parallel_size '
    'tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards'
).split()
_ONE = re.compile('(.*model|context)_parallel_size|num_query_groups')  # by default
_SIZES = (*_NUMBERS, 'max_position_embeddings')
_SWITCHES = (
    'account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split sequence_parallel '
    'group_query_attention multi_latent_attention swiglu bf16 fp16 full_validation '
    'decrease_batch_size_if_needed'
).split()
# Words of Megatron's checks that ask the machine: that of the job may be another one.
_OF_MACHINE = re.compile(r'environ|transformer.engine|\bTE\b|cuda|\bGPU', re.IGNORECASE)


@dataclass(frozen=True)
class LaunchLine:
    """A launch line, parsed."""

    args: argparse.Namespace  # Megatron's arguments, not validated
    unknown: tuple[str, ...]  # words that Megatron's own parser does not know
    lacks: str  # why Megatron's own parser did not read it; empty: it did
    world_size: int  # processes of the job
    on_cpu: bool  # whether it runs on the CPU
    words: tuple[str, ...]  # the script's own flags
    launcher: tuple[str, ...] = ()  # what starts the script
    script: str | None = None  # its path; None: the line is flags alone

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f'launch line: {message}')


def read(words: Sequence[str], gpus: int | None = None) -> LaunchLine:
    """Parse a launch line: `torchrun ... pretrain_gpt.py FLAG ...`, or the flags alone.

    `gpus` are by default those that torchrun is given, or WORLD_SIZE, or as few as it takes.
    """
    launcher, script, flags = divided(words)
    if script is not None:
        _require_launcher(launcher, script, flags)
    lacks = _lacks()
    parser = _parser(lacks)
    on_cpu = '--cpu' in launcher
    given = [*(cpu_flags(flags) if on_cpu else ()), *flags]
    args, unknown, checks = parse(parser, parser.parse_known_args, given, where='launch line: ')
    with checks.one(''):
        require_spelt(unknown)
    checks.require_all(BY_FLAG)
    world_size = gpus or _processes(launcher) or Sizes(args).ranks_of_replica
    near = ((word, _nearest(word, parser, _THEIRS)) for word in (() if lacks else unknown))
    hinted = (f'{word} (did you mean {meant}?)' if meant else word for word, meant in near)
    own = tuple(flags), tuple(launcher), script
    return LaunchLine(args, tuple(hinted), lacks, world_size, on_cpu, *own)


def _require_launcher(launcher: list[str], script: str, flags: list[str]) -> None:
    if '--cpu' in flags and 'megatron_zbpp.launch' in launcher:
        raise ValueError(
            f'launch line: --cpu is no flag of {script}: write it before, behind '
            'megatron_zbpp.launch'
        )
    path, asked = Path(script), any(word.startswith('--pipeline-schedule') for word in flags)
    if not asked or 'megatron_zbpp.launch' in launcher or not path.is_file():
        return
    if 'megatron_zbpp' not in path.read_text(encoding='utf-8', errors='replace'):
        raise ValueError(
            f'launch line: {script} does not know --pipeline-schedule: write -m '
            f'megatron_zbpp.launch before it, or patch it (patches/apply.py)'
        )


def require_spelt(unknown: Sequence[str]) -> None:
    """Raise for a flag that nobody knows and that is nearly one of ours."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    for word in unknown:
        if near := _nearest(word, parser, _OURS):
            raise ValueError(f'launch line: {word} is not known: did you mean {near}?')


def _nearest(word: str, parser: argparse.ArgumentParser, cutoff: float) -> str:
    """Return the flag that is meant, by its likeness from 0 to 1; empty: none, or no flag."""
    name = word.partition('=')[0]
    known = parser._option_string_actions if name.startswith('--') else ()
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), '')


def divided(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the words before a script, its path (None: flags alone), and the words behind it."""
    for index, word in enumerate(words):
        if word.endswith('.py') and not word.startswith('-'):
            return list(words[:index]), word, list(words[index + 1 :])
    return [], None, list(words)


def _lacks() -> str:
    try:
        require_packages(TRAINING)
    except RuntimeError as error:
        return str(error)
    return '' if TRAINING in sys.modules else 'megatron.training is not here'


def _parser(lacks: str) -> argparse.ArgumentParser:
    """Return Megatron's own parser with our flags; where it lacks, one of what concerns us."""
    parser = _Parser(allow_abbrev=False)
    if not lacks:
        add = importlib.import_module(TRAINING).add_megatron_arguments
        add_arguments(getattr(add, '__wrapped__', add)(parser))  # ours once
        return parser
    add_arguments(parser)
    for name in _NUMBERS:
        parser.add_argument(flag(name), type=int, default=1 if _ONE.fullmatch(name) else None)
    for name in _SWITCHES:
        parser.add_argument(flag(name), action='store_true')
    parser.add_argument('--pipeline-model-parallel-layout')
    parser.add_argument('--recompute-granularity')
    for name in DRAWING:
        default = 0.1 if name.endswith('dropout') else None
        parser.add_argument(flag(name), type=float, nargs='?', const=True, default=default)
    parser.add_argument('--rampup-batch-size', nargs='*')
    parser.add_argument('--fp8-format', dest='fp8')
    parser.add_argument('--fp4-format', dest='fp4')
    parser.add_argument('--transformer-impl', default='transformer_engine')
    known = {'fp8', 'fp4', 'transformer_impl', *_NUMBERS, *_SWITCHES}
    for name in sorted({*rules.settings()} - known):
        parser.add_argument(flag(name), nargs='?', const=True)
    return parser


def _processes(launcher: list[str]) -> int | None:
    """Return the number of processes of torchrun, or of the environment; None: not known."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument('--nproc-per-node', '--nproc_per_node', default='1')
    parser.add_argument('--nnodes', default='1')
    args, _ = parser.parse_known_args(launcher)
    if (args.nproc_per_node, args.nnodes) == ('1', '1'):
        return int(os.environ.get('WORLD_SIZE', 0)) or None
    for name, value in vars(args).items():
        if not value.isdecimal() or int(value) == 0:
            raise ValueError(f'launch line: {flag(name)} {value} is no number: give --gpus')
    return int(args.nproc_per_node) * int(args.nnodes)


def require_possible(line: LaunchLine) -> None:
    """Raise ValueError for sizes that no job has: 0, or heads and groups that do not divide."""
    args, given = line.args, {name: getattr(line.args, name, None) for name in _SIZES}
    for name, value in given.items():
        if value is not None and value < (name != 'eval_iters'):
            raise ValueError(f'{flag(name)} {value} is not possible: give a whole number from 1 up')
    pairs = [('num_attention_heads', 'num_query_groups')] * args.group_query_attention
    pairs += [('hidden_size', 'num_attention_heads')] * (given['kv_channels'] is None)
    for whole, part in pairs:
        number, divisor = given[whole], given[part]
        if number and divisor and number % divisor:
            raise ValueError(
                f'{flag(part)} {given[part]} does not divide {flag(whole)} {given[whole]}: give a '
                'divisor'
            )


def require_sizes(line: LaunchLine) -> str:
    """Return the complaint of Megatron's validation that is not about sizes; empty: none.

    ValueError names sizes that it refuses. Layers are placed already, if that is ours to do.
    """
    args = copy.deepcopy(line.args)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _validate(replace(line, args=args))
    except (Exception, SystemExit) as error:
        source = traceback.extract_tb(error.__traceback__)[-1].line or ''
        told = ' '.join(str(error).split()) or source
        words = {*re.findall(r'\w+', f'{told} {source}'.replace('-', '_'))}
        given = ((name, getattr(args, name, None)) for name in _SIZES if name in words)
        wrong = [f'{flag(name)} {value}' for name, value in given if value is not None]
        if wrong and not _OF_MACHINE.search(f'{told} {source}'):
            raise ValueError(f'{", ".join(wrong)}: Megatron refuses it ({told})') from error
        return '' if line.lacks else f'validation by Megatron itself ends here: {told}'
    return ''


def _validate(line: LaunchLine) -> None:
    """Let Megatron check its arguments, and fill them; its config alone without a training loop."""
    args = line.args
    if not line.lacks:
        training = importlib.import_module(TRAINING)
        args.rank, args.world_size = 0, line.world_size
        args.deterministic_mode = False  # which changes torch in this process
        training.validate_args(args)
        training.core_transformer_config_from_args(args)
        return
    from megatron.core.transformer import TransformerConfig

    known = {each.name for each in fields(TransformerConfig)} - {'pipeline_model_parallel_size'}
    given = {name: getattr(args, name, None) for name in _SIZES if name in known}
    given['num_moe_experts'] = args.num_experts
    given['num_query_groups'] = args.num_query_groups if args.group_query_attention else None
    if all(given[name] for name in ('num_layers', 'hidden_size', 'num_attention_heads')):
        TransformerConfig(**{name: value for name, value in given.items() if value is not None})


OWN = 'as it is'  # the schedule of the line: Megatron's own, or what its flags name
LAUNCHER = 'megatron_zbpp.launch'
# Flags of a job, with what they are followed by, that a bench sets itself or has no use for.
_SET = (
    'train-iters train-samples exit-interval exit-duration-in-mins log-interval save save-interval '
    'save-retain-interval load ckpt-step eval-iters tensorboard-dir wandb-project '
    'wandb-exp-name wandb-save-dir one-logger-project pipeline-schedule pipeline-schedule-file'
).split()
_UNUSED = ('--finetune', '--no-load-optim', '--no-load-rng', '--skip-train')


@dataclass(frozen=True)
class Bench:
    """A launch line, divided."""

    launcher: tuple[str, ...]  # what starts the script, our launcher included
    script: str  # its path
    flags: tuple[str, ...]  # of the script, without those that a bench sets
    line: LaunchLine  # what was read of it
    own: tuple[str, ...]  # the words that name the line's own schedule; none: Megatron's
    load: str | None  # the checkpoint that it begins with; None: it starts from scratch

    @classmethod
    def of(cls, words: Sequence[str], cpu: bool = False) -> Bench:
        launcher, script, flags = divided(words)
        if script is None:
            raise ValueError(
                'the launch line names no script: give all of it, such as torchrun '
                '--nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...'
            )
        if LAUNCHER not in launcher:
            launcher += ['-m', LAUNCHER] if launcher else ['python', '-m', LAUNCHER]
        if cpu and '--cpu' not in launcher:
            launcher.append('--cpu')
        line = read([*launcher, script, *flags])
        name, file = line.args.pipeline_schedule, line.args.pipeline_schedule_file
        own = ('--pipeline-schedule-file', file) if file else ('--pipeline-schedule', name)
        return cls(
            tuple(launcher),
            script,
            tuple(without(flags, _SET, _UNUSED)),
            line,
            own if file or name else (),
            getattr(line.args, 'load', None) or value_of(flags, '--load'),
        )

    @property
    def tokens(self) -> int | None:
        """Of a step; None: the line does not say."""
        batch, length = self.line.args.global_batch_size, self.line.args.seq_length
        return batch * length if batch and length else None

    def start(self, folder: str) -> list[str]:
        """Return the line that writes the checkpoint from which all runs begin, by stock."""
        made = ['--save', folder, '--save-interval', '1', '--no-save-optim', '--no-save-rng']
        return self._line(self._plain(), 1, [*made, '--ckpt-format', 'torch_dist'])

    def run(self, schedule: str, iterations: int, start: str) -> list[str]:
        """Return the line of one run that begins with the checkpoint in the folder `start`."""
        named = self.own if schedule == OWN else ('--pipeline-schedule', schedule)
        flags = [*self.flags, *named] if named else self._plain()
        own = [] if start == self.load else ['--ckpt-format', 'torch_dist']
        loads = ['--load', start, '--finetune', '--no-load-optim', '--no-load-rng', *own]
        return self._line(flags, iterations, loads)

    def _plain(self) -> list[str]:
        switches = [each.name for each in FLAGS if not each.unit]
        return list(without(self.flags, (f.name[2:] for f in FLAGS if f.unit), switches))

    def _line(self, flags: Iterable[str], iterations: int, more: Sequence[str]) -> list[str]:
        args = self.line.args
        samples, own = (getattr(args, name, None) for name in ('train_samples', 'train_iters'))
        unit, count = ('samples', args.global_batch_size or 1) if samples else ('iters', 1)
        length = [f'--train-{unit}', str(iterations * count)]
        if decay := getattr(args, f'lr_decay_{unit}', None) or samples or own:
            length += [f'--lr-decay-{unit}', str(decay)]
        found = [*self.launcher, self.script, *flags, *length]
        return [*found, '--log-interval', '1', '--eval-iters', '0', *more]


def value_of(flags: Sequence[str], name: str) -> str | None:
    for word, behind in zip(flags, [*flags[1:], None], strict=False):
        flag, given, value = word.partition('=')
        if flag == name:
            return value if given else behind
    return None


class Step(NamedTuple):
    """One iteration as Megatron logged it."""

    seconds: float  # that it took
    loss: str | None  # as printed; None: it printed none
    # share of all GPU time; None: Megatron's own schedule ran, which does not tell
    idle: float | None


_STEP = re.compile(r' iteration +\d+/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+)')
_LOSS = re.compile(r' lm loss: (\S+)')
_IDLE = re.compile(r' idle GPU time: ([\d.]+)%')
_PEAK = re.compile(r' max allocated: ([\d.]+)')
_ERROR = re.compile(r'(?:\w*Error|\berror): \S')
_MIB = 2**20


@dataclass
class Printed:
    """Iterations, memory and errors that a run has printed so far."""

    steps: list[Step] = field(default_factory=list[Step])  # iterations
    peak_bytes: float | None = None  # most that a GPU's tensors took; None: nothing told it
    said: str = 'it printed nothing'  # its last line, or the first that names an error
    _failed: bool = False

    def read(self, line: str) -> None:
        if not self._failed and line.strip():
            self.said, self._failed = line.strip(), _ERROR.search(line) is not None
        if peak := _PEAK.search(line):
            most = max(self.peak_bytes or 0.0, float(peak[1]) * _MIB)
            self.peak_bytes = most or None  # a CPU tells 0
        if step := _STEP.search(line):
            loss, idle = _LOSS.search(line), _IDLE.search(line)
            self.steps.append(
                Step(float(step[1]) / 1e3, loss and loss[1], float(idle[1]) / 100 if idle else None)
            )
