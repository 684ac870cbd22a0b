"""Schedules on several ranks of NCCL that share one GPU: to the bit of Megatron's 1F1B, no hang.

    python -m benchmarks.one_gpu.nccl [--cases NAME ...] [--only SCHEDULE ...]

Each line is a training of a small GPT in processes of its own, compared with Megatron's own
schedule under the same flags: losses, parameters and, where it is not sharded, Adam's state.
Cases run side by side, as nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.one_gpu import REHEARSAL, ranks

RANK = Path(__file__).with_name('rank.py')
PREPARE = ['examples/gpt/prepare_data.py', '--input', 'megatron_zbpp', '--output']
MODEL = """--hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1
    --bf16 --clip-grad 1e9 --num-layers 8 --log-interval 1000""".split()
REPLICAS = """--overlap-grad-reduce --use-distributed-optimizer --gradient-accumulation-fusion
    --ddp-side-stream""".split()
EARLY = ['--enable-optimizer-post-validation', '--optimizer-post-validation-clean-steps', '0']


@dataclass(frozen=True)
class Case:
    """Trainings under the same sizes.

    Attributes:
        name: of the case.
        sizes: pipeline, tensor and data parallel.
        schedules: flags by name, beside `--pipeline-schedule`.
        flags: of all of them, the reference included.
        delays: whether the device sleeps before each W, but for the reference.
    """

    name: str
    sizes: tuple[int, int, int]
    schedules: dict[str, tuple[str, ...]]
    flags: tuple[str, ...] = ()
    delays: bool = False

    @property
    def num_ranks(self) -> int:
        p, t, d = self.sizes
        return p * t * d

    def words(self, schedule: str, metrics: Path, data: Path, iterations: int) -> list[str]:
        """Return the command of each rank."""
        p, t, _ = self.sizes
        words = [str(RANK), *MODEL, '--pipeline-model-parallel-size', str(p)]
        words += ['--tensor-model-parallel-size', str(t), '--global-batch-size', '8']
        words += ['--train-iters', str(iterations), '--data-path', str(data)]
        words += ['--metrics-file', str(metrics), *self.flags]
        name = schedule.partition(' ')[0]
        return [*words, '--pipeline-schedule', name, *self.schedules.get(schedule, ())]


CASES = (
    Case(
        'p2',
        (2, 1, 1),
        {
            '1f1b': (),
            'zb-h1': (),
            'zb-v': (),
        },
    ),
    Case(
        'p2 more',
        (2, 1, 1),
        {
            'zb-v validated later': tuple(EARLY),
            'po offloaded': ('--pipeline-offload', 'all'),
            'v-half': (),
        },
    ),
    Case(
        'p4',
        (4, 1, 1),
        {'zb-v': (), 'bpipe': (), 'zb-h1': (), 'po offloaded': ('--pipeline-offload', 'all')},
    ),
    Case('p2 t2', (2, 2, 1), {'zb-v': (), 'zb-h1': ()}),
    Case('p2 d2', (2, 1, 2), {'zb-v': (), 'zb-h1': ()}, tuple(REPLICAS), delays=True),
)


def trained(metrics: Path) -> tuple[list[str], dict, dict]:
    """Return losses, hashes of parameters and of the optimizer's state."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line['loss'] for line in lines if 'loss' in line]
    return losses, lines[-1]['parameters_sha256'], lines[-1]['optimizer_sha256']


def run_case(case: Case, args: argparse.Namespace, data: Path) -> bool:
    """Run the reference and the chosen schedules; return whether all went well."""
    names = [name for name in case.schedules if args.only is None or name in args.only]
    fine, expected = True, None
    for name in ('megatron', *names):
        logs = args.logs / f'{case.name} {name}'.replace(' ', '-')
        metrics = logs / 'metrics.jsonl'
        metrics.unlink(missing_ok=True)
        delays = '1' if case.delays and name != 'megatron' else '0'
        words = case.words(name, metrics, data, args.iterations)
        failed = ranks.run(case.num_ranks, words, logs, args.seconds, DELAYS=delays)
        found = None if failed else trained(metrics)
        if name == 'megatron':
            expected = found
        elif not failed and found != expected:
            failed = 'not the bits of the reference'
        lines = (logs / 'rank0.log').read_text().splitlines()
        memory = [line for line in lines if line.startswith('memory:')]
        said = failed and f'FAILED: {failed}, see {logs}'
        print(f'{case.name}, {name}: {said or "done"}', *memory, flush=True)
        fine = fine and not failed
        if expected is None:
            return False
    return fine


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all ran to the bit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', help='names of schedules; default: all')
    parser.add_argument('--cases', nargs='+', default=[case.name for case in CASES])
    parser.add_argument('--iterations', type=int, default=6)
    parser.add_argument('--seconds', type=float, default=120, help='after which a training hangs')
    parser.add_argument('--together', type=int, default=5, help='cases at a time')
    parser.add_argument('--logs', type=Path, default=Path(tempfile.gettempdir()) / 'one_gpu')
    args = parser.parse_args(argv)
    args.logs = args.logs.resolve()
    real = torch.cuda.is_available()
    version = '.'.join(map(str, torch.cuda.nccl.version())) if real else 'no NCCL'
    print(f'NCCL {version}, {torch.cuda.get_device_name()}' if real else REHEARSAL, flush=True)
    data = args.logs / 'data' / 'text'
    data.parent.mkdir(parents=True, exist_ok=True)
    failed = ranks.run(1, [*PREPARE, str(data)], args.logs / 'data', 300)
    if failed:
        print(f'FAILED: preparing the data: {failed}, see {args.logs / "data"}')
        return 1
    chosen = [case for case in CASES if case.name in args.cases]
    with ThreadPoolExecutor(args.together) as pool:
        right = list(pool.map(lambda case: run_case(case, args, data), chosen))
    return 0 if right and all(right) else 1


if __name__ == '__main__':
    sys.exit(main())
