"""Lines of `zbpp` that each command takes, and how a line ends."""

import contextlib
import io
from collections.abc import Sequence

from megatron_zbpp.cli import main

SHAPE = '--pp 2 --microbatches 4'
MODEL = '--model gpt --num-layers 4 --hidden 64 --heads 2 --vocab 128 --seq 32 --tflops 1'
# by command; `doctor` and `bench` take Megatron and a job
LINES = {
    'list': 'list',
    'show': f'show --schedule zb-v {SHAPE}',
    'simulate': f'simulate --schedule zb-v {SHAPE}',
    'check': 'check plan.json',
    'compare': f'compare --schedules zb-v,1f1b {SHAPE}',
    'plan': f'plan {SHAPE} --seconds 0.02',
    'partition': f'partition layers.json {SHAPE} --seconds 0.02',
    'profile': f'profile {MODEL}',
    'bubbles': f'bubbles --schedule 1f1b {SHAPE}',
    'freeze': f'freeze --schedule zb-h1 {SHAPE}',
    'advise': f'advise --gpus 4 --memory 5GiB --global-batch-size 8 --schedules 1f1b,zb-v {MODEL}',
    'page': f'page {SHAPE} --vpp 2 -o out.html',
    'convert': f'convert --schedule zb-v {SHAPE} -o out.json',
}


def ended(words: Sequence[str], notes: bool = False) -> tuple[int, str, str]:
    """The exit code of a line, what was printed, and the errors: without notes, or with them."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            code = main(words)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    lines = [line for line in errors.getvalue().splitlines() if notes or ': note: ' not in line]
    return code, out.getvalue(), '\n'.join(lines)
