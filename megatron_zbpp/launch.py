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
from collections.abc import Sequence
from pathlib import Path

from megatron_zbpp.emulation import cpu, te

PATH = 'PYTHONPATH'
# What a machine without a GPU needs; whatever the user gives comes later and so wins.
_LOCAL = ('--transformer-impl=local', '--no-gradient-accumulation-fusion')
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
        '--cpu',
        action='store_true',
        help='run on CPU and gloo, with the flags that this needs; with --transformer-impl '
        "transformer_engine: on Transformer Engine's own modules, their kernels emulated",
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
        if wants_transformer_engine(args.arguments):
            try:
                te.install()
            except ModuleNotFoundError as error:
                parser.exit(2, f'{parser.prog}: error: {error}\n')
        folders = [
            str(Path(cpu.__file__).parent / 'subprocess_hook'),
            *filter(None, [os.environ.get(PATH)]),
        ]
        os.environ[PATH] = os.pathsep.join(folders)

    from megatron_zbpp.mcore.command_line import arguments

    arguments.install()
    before = cpu_flags(args.arguments) if args.cpu else ()
    sys.argv = [str(args.script), *before, *args.arguments]
    runpy.run_path(str(args.script), run_name='__main__')


def cpu_flags(words: Sequence[str]) -> tuple[str, ...]:
    """The flags that a script with the flags `words` needs on a CPU."""
    emulated = wants_transformer_engine(words)
    return tuple(flag for flag in CPU_FLAGS if not (emulated and flag in _LOCAL))


def wants_transformer_engine(words: Sequence[str]) -> bool:
    """Whether a script with the flags `words` asks for the layers of Transformer Engine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--transformer-impl')
    known, _ = parser.parse_known_args(list(words))
    return known.transformer_impl == 'transformer_engine'


if __name__ == '__main__':
    main()
