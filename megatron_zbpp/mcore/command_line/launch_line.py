"""Reads the command line of a training job without starting it.

With `megatron.training` at hand by Megatron's own parser; else only what concerns us: our flags,
the sizes and the parallelism.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_zbpp.emulation.flags import cpu_flags
from megatron_zbpp.mcore import refusals
from megatron_zbpp.mcore.command_line.flags import add_arguments
from megatron_zbpp.mcore.command_line.messages import flag

# Megatron's flags that say how many layers, ranks and microbatches there are
_NUMBERS = {
    'num_layers': None,
    'tensor_model_parallel_size': 1,
    'pipeline_model_parallel_size': 1,
    'context_parallel_size': 1,
    'expert_model_parallel_size': 1,
    'num_layers_per_virtual_pipeline_stage': None,
    'num_virtual_stages_per_pipeline_rank': None,
    'decoder_first_pipeline_num_layers': None,
    'decoder_last_pipeline_num_layers': None,
    'micro_batch_size': None,
    'global_batch_size': None,
    'hidden_size': None,
    'ffn_hidden_size': None,
    'num_attention_heads': None,
    'num_query_groups': 1,
    'kv_channels': None,
    'num_experts': None,
    'seq_length': None,
}
_SWITCHES = (
    'account_for_embedding_in_pipeline_split',
    'account_for_loss_in_pipeline_split',
    'sequence_parallel',
    'group_query_attention',
    'multi_latent_attention',
    'swiglu',
    'bf16',
    'fp16',
)


@dataclass(frozen=True)
class LaunchLine:
    """What a launch line says.

    Attributes:
        args: Megatron's arguments, not validated.
        unknown: words that Megatron's own parser does not know.
        whole: whether Megatron's own parser read it.
        world_size: processes of the job.
        on_cpu: whether it runs on the CPU.
        words: the script's own flags.
    """

    args: argparse.Namespace
    unknown: tuple[str, ...]
    whole: bool
    world_size: int
    on_cpu: bool
    words: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """One that raises."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f'launch line: {message}')


def read(words: Sequence[str], gpus: int | None = None) -> LaunchLine:
    """Return what a launch line says.

    Args:
        words: `torchrun ... pretrain_gpt.py FLAG ...`, or the flags alone.
        gpus: of the job; default: what torchrun is given, or WORLD_SIZE, or as few as it takes.

    Raises:
        ValueError: words that make no sense.
    """
    launcher, flags = _divided(words)
    whole = _has_training()
    parser = _megatrons_parser() if whole else _own_parser()
    on_cpu = '--cpu' in launcher
    args, unknown = parser.parse_known_args([*(cpu_flags(flags) if on_cpu else ()), *flags])
    world_size = gpus or _processes(launcher) or _fewest(args)
    return LaunchLine(
        args, tuple(unknown if whole else ()), whole, world_size, on_cpu, tuple(flags)
    )


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what launches the script, and the script's own words."""
    for index, word in enumerate(words):
        if word.endswith('.py') and not word.startswith('-'):
            return list(words[:index]), list(words[index + 1 :])
    return [], list(words)


def _has_training() -> bool:
    try:
        return importlib.util.find_spec('megatron.training.arguments') is not None
    except ModuleNotFoundError:
        return False


def _megatrons_parser() -> argparse.ArgumentParser:
    from megatron.training import arguments as megatrons

    parser = _Parser(allow_abbrev=False)
    add = megatrons.add_megatron_arguments
    add = getattr(add, '__wrapped__', add)  # ours are added below
    add_arguments(add(parser))
    return parser


def _own_parser() -> argparse.ArgumentParser:
    parser = _Parser(allow_abbrev=False)
    add_arguments(parser)
    for name, default in _NUMBERS.items():
        parser.add_argument(flag(name), type=int, default=default)
    for name in _SWITCHES:
        parser.add_argument(flag(name), action='store_true')
    parser.add_argument('--pipeline-model-parallel-layout')
    parser.add_argument('--recompute-granularity')
    parser.add_argument('--hidden-dropout', type=float, default=0.1)
    parser.add_argument('--rampup-batch-size', nargs='*')
    parser.add_argument('--fp8-format', dest='fp8')
    parser.add_argument('--fp4-format', dest='fp4')
    parser.add_argument('--transformer-impl', default='transformer_engine')
    for name in refusals.settings():
        if name not in ('fp8', 'fp4', 'context_parallel_size', 'transformer_impl'):
            parser.add_argument(flag(name), nargs='?', const=True)
    return parser


def _processes(launcher: list[str]) -> int | None:
    """As many as torchrun would start, or the environment says; None: neither says."""
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


def _fewest(args: argparse.Namespace) -> int:
    """Return processes of one replica of the model."""
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
