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
from collections.abc import Iterator, MutableMapping, Sequence
from math import gcd
from pathlib import Path

PATH = 'PYTHONPATH'


class _Parser(argparse.ArgumentParser):
    """One whose help ends in the flags that the script gets from us."""

    def format_help(self) -> str:
        from megatron_zbpp.launch import flags

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
    from megatron_zbpp.emulation import cpu, cpu_flags, te, wants_transformer_engine  # takes torch

    sys.path.insert(0, str(args.script.resolve().parent))  # its megatron is the one to use
    if args.cpu:
        try:
            cpu.install()
            if wants_transformer_engine(args.arguments):
                te.install()
        except ModuleNotFoundError as error:
            parser.exit(2, f'{parser.prog}: error: {error}\n')
        hook = str(Path(cpu.__file__).parent / 'subprocess_hook')
        os.environ[PATH] = os.pathsep.join([hook, *filter(None, [os.environ.get(PATH)])])

    from megatron_zbpp.launch import flags
    from megatron_zbpp.mcore import enabled

    try:
        if args.pair_partners:
            os.environ['RANK'] = str(rank_for(args.arguments, os.environ))
        flags.install()
        if os.environ.get('RANK', '0') == '0' and (lacks := flags.lacks_compiler()):
            raise RuntimeError(lacks)
    except (RuntimeError, ValueError) as error:
        parser.exit(2, f'{parser.prog}: error: {error}\n')
    before = cpu_flags(args.arguments) if args.cpu else ()
    sys.argv = [str(args.script), *before, *args.arguments]
    try:
        runpy.run_path(str(args.script), run_name='__main__')
    finally:
        if not flags.has_run and enabled.plugin is None:
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


def rank_for(words: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Return the rank that this process becomes."""
    missing = [name for name in ('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE') if name not in environ]
    if missing:
        raise ValueError(f'--pair-partners needs {", ".join(missing)}: launch with torchrun')
    rank, world, local = (int(environ[n]) for n in ('RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE'))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument('--pipeline-model-parallel-size', type=int, default=1)
    parser.add_argument('--tensor-model-parallel-size', type=int, default=1)
    parser.add_argument('--use-tp-pp-dp-mapping', action='store_true')
    sizes, _ = parser.parse_known_args(list(words))
    if sizes.use_tp_pp_dp_mapping:
        raise ValueError(
            '--pair-partners orders stages that are far apart, which --use-tp-pp-dp-mapping puts '
            'side by side: give one of them'
        )
    stages, tensor = sizes.pipeline_model_parallel_size, sizes.tensor_model_parallel_size
    return tuple(paired(world, stages, tensor, local))[rank]


def paired(world: int, stages: int, tensor: int, local: int) -> Iterator[int]:
    """Yield the rank of each process, node by node.

    On each node first ranks of a stage and then as many of its partner; the first stays the first.
    """
    if world % stages:
        raise ValueError(f'{world} ranks are not a multiple of {stages} pipeline ranks')
    each = world // stages  # ranks of a stage
    together = gcd(each, local // 2)  # of them on one node
    fits = world % local == 0 and local % 2 == 0 and together % tensor == 0
    if world > local and not fits:
        raise ValueError(
            f'--pair-partners: nodes of {local} processes cannot hold both of a pair, '
            f'{tensor} ranks of either at least: give nodes an even number of processes, a '
            'multiple of twice the tensor-parallel size, or leave it out'
        )
    if world <= local:
        yield from range(world)  # one node: all are beside each other
        return
    for first in range((stages + 1) // 2):
        pair = dict.fromkeys((first, stages - 1 - first))
        for begin in range(0, each, together):
            for stage in pair:
                yield from range(stage * each + begin, stage * each + begin + together)
