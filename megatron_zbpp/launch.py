"""Runs an unmodified training script of Megatron-LM with our flags.

    torchrun --nproc-per-node 8 -m megatron_zbpp.launch /path/to/pretrain_gpt.py ... \
        --pipeline-schedule zb-v

Everything behind the script's name is the script's. Its --help shows our flags among Megatron's.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from megatron_zbpp.emulation import cpu

PATH = 'PYTHONPATH'
# What a machine without a GPU needs; whatever the user gives comes later and so wins.
CPU_FLAGS = (
    '--transformer-impl=local',
    '--distributed-backend=gloo',
    '--no-gradient-accumulation-fusion',
    '--no-masked-softmax-fusion',
    '--no-bias-gelu-fusion',
    '--no-bias-swiglu-fusion',
    '--no-bias-dropout-fusion',
    '--no-persist-layer-norm',
    '--no-rope-fusion',
)


def main(argv: list[str] | None = None) -> None:
    """Runs the script as if it had been started by itself.

    Args:
        argv: our options, the script, and its arguments; default: the command line.
    """
    parser = argparse.ArgumentParser(
        prog='python -m megatron_zbpp.launch',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--cpu', action='store_true', help='run on CPU and gloo, with the flags that this needs'
    )
    parser.add_argument('script', type=Path, help='such as Megatron-LM/pretrain_gpt.py')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args(argv)
    if not args.script.is_file():
        hint = 'give the path of a training script of Megatron-LM'
        parser.exit(2, f'{parser.prog}: error: no script {args.script}: {hint}\n')
    sys.path.insert(0, str(args.script.resolve().parent))  # its megatron is the one to use
    if args.cpu:
        cpu.install()
        folders = [
            str(Path(cpu.__file__).parent / 'children'),
            *filter(None, [os.environ.get(PATH)]),
        ]
        os.environ[PATH] = os.pathsep.join(folders)

    from megatron_zbpp.mcore import arguments

    arguments.install()
    sys.argv = [str(args.script), *(CPU_FLAGS if args.cpu else ()), *args.arguments]
    runpy.run_path(str(args.script), run_name='__main__')


if __name__ == '__main__':
    main()
