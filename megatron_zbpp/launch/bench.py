"""Launch lines of a bench, made of a user's own, and what a run of one printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_zbpp.launch import launch_line
from megatron_zbpp.launch.flags import FLAGS, without
from megatron_zbpp.launch.launch_line import LaunchLine

OWN = 'as it is'  # the schedule of the line: Megatron's own, or what its flags name
LAUNCHER = 'megatron_zbpp.launch'
# Flags of a job, with what they are followed by, that a bench sets itself or has no use for.
_SET = (
    'train-iters train-samples exit-interval exit-duration-in-mins log-interval save save-interval '
    'save-retain-interval load ckpt-step eval-iters tensorboard-dir wandb-project '
    'wandb-exp-name wandb-save-dir one-logger-project pipeline-schedule pipeline-schedule-file'
).split()
_SWITCHES = ('--finetune', '--no-load-optim', '--no-load-rng', '--skip-train')


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
        launcher, script, flags = launch_line.divided(words)
        if script is None:
            raise ValueError(
                'the launch line names no script: give all of it, such as torchrun '
                '--nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...'
            )
        if LAUNCHER not in launcher:
            launcher += ['-m', LAUNCHER] if launcher else ['python', '-m', LAUNCHER]
        if cpu and '--cpu' not in launcher:
            launcher.append('--cpu')
        line = launch_line.read([*launcher, script, *flags])
        name, file = line.args.pipeline_schedule, line.args.pipeline_schedule_file
        own = ('--pipeline-schedule-file', file) if file else ('--pipeline-schedule', name)
        return cls(
            tuple(launcher),
            script,
            tuple(without(flags, _SET, _SWITCHES)),
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
