r"""Runs an unmodified training script of Megatron-LM with our flags.

    torchrun --nproc-per-node 8 -m megatron_zbpp.launch /path/to/pretrain_gpt.py ... \
        --pipeline-schedule zb-v

Everything behind the script's name is the script's: Megatron's flags, and ours, which stand below.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from megatron_zbpp.emulation import cpu, te
from megatron_zbpp.emulation.flags import cpu_flags, wants_transformer_engine

PATH = 'PYTHONPATH'


class _Parser(argparse.ArgumentParser):
    """One whose help ends in the flags that the script gets from us."""

    def format_help(self) -> str:
        from megatron_zbpp.mcore.command_line import flags

        ours = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        flags.add_arguments(ours)
        return f'{super().format_help()}\n{ours.format_help()}'


def main(argv: list[str] | None = None) -> None:
    """Run the script as if it had been started by itself.

    Args:
        argv: our options, the script, and its arguments; default: the command line.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if '--cpu' in args.arguments:
        parser.exit(
            2, f'{parser.prog}: error: --cpu is no flag of {args.script}: write it before\n'
        )
    if not args.script.is_file():
        hint = 'give the path of a training script of Megatron-LM'
        parser.exit(2, f'{parser.prog}: error: no script {args.script}: {hint}\n')
    sys.path.insert(0, str(args.script.resolve().parent))  # its megatron is the one to use
    if args.cpu:
        try:
            _install_cpu(args.arguments)
        except ModuleNotFoundError as error:
            parser.exit(2, f'{parser.prog}: error: {error}\n')

    from megatron_zbpp.mcore import enabled
    from megatron_zbpp.mcore.command_line import arguments, pairing

    try:
        if args.pair_partners:
            os.environ['RANK'] = str(pairing.rank_for(args.arguments, os.environ))
        arguments.install()
        if os.environ.get('RANK', '0') == '0' and (lacks := arguments.lacks_compiler()):
            raise RuntimeError(lacks)
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    before = cpu_flags(args.arguments) if args.cpu else ()
    sys.argv = [str(args.script), *before, *args.arguments]
    try:
        runpy.run_path(str(args.script), run_name='__main__')
    finally:
        if not arguments.has_run and enabled.plugin is None:
            print(
                f'megatron_zbpp: {args.script} did not read the flags of Megatron-LM: no schedule '
                'was asked for, and nothing was changed; call megatron_zbpp.enable() in it',
                file=sys.stderr,
            )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog='python -m megatron_zbpp.launch',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--cpu',
        action='store_true',
        help='run on CPU and gloo, with the flags that this needs; with --transformer-impl '
        "transformer_engine: on Transformer Engine's own modules, their kernels emulated (from a "
        'checkout of megatron_zbpp only). Data is loaded without workers unless --num-workers says '
        'otherwise',
    )
    parser.add_argument(
        '--pair-partners',
        action='store_true',
        help='give processes their ranks so that the first and the last stage are on one node, the '
        'second and the last but one, and so on: those that exchange activations with bpipe',
    )
    parser.add_argument('script', type=Path, help='such as Megatron-LM/pretrain_gpt.py')
    parser.add_argument('arguments', nargs=argparse.REMAINDER, help="the script's own")
    return parser


def _install_cpu(words: list[str]) -> None:
    cpu.install()
    if wants_transformer_engine(words):
        te.install()
    hook = str(Path(cpu.__file__).parent / 'subprocess_hook')
    os.environ[PATH] = os.pathsep.join([hook, *filter(None, [os.environ.get(PATH)])])


if __name__ == '__main__':
    main()
