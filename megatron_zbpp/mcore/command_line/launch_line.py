"""Reads the command line of a training job without starting it.

With `megatron.training` at hand by Megatron's own parser; else only what concerns us: our flags,
the sizes and the parallelism.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_zbpp.emulation.flags import cpu_flags
from megatron_zbpp.mcore.command_line.arguments import require_packages
from megatron_zbpp.mcore.command_line.flags import add_arguments
from megatron_zbpp.mcore.command_line.messages import flag
from megatron_zbpp.mcore.command_line.parsing import parse
from megatron_zbpp.mcore.job import rules_table
from megatron_zbpp.mcore.start.scratch_losses import DRAWING

TRAINING = 'megatron.training.arguments'
# How like a flag of ours, or of Megatron's, a word must be to be taken for it.
_OURS, _THEIRS = 0.85, 0.8
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
    'eval_global_batch_size': None,
    'eval_micro_batch_size': None,
    'eval_iters': None,
    'hidden_size': None,
    'ffn_hidden_size': None,
    'num_attention_heads': None,
    'num_query_groups': 1,
    'kv_channels': None,
    'num_experts': None,
    'seq_length': None,
    'expert_tensor_parallel_size': None,
    'tensor_parallel_num_weight_shards': None,
    'expert_tensor_parallel_num_weight_shards': None,
}
SIZES = (*_NUMBERS, 'max_position_embeddings')
_SWITCHES = (
    'account_for_embedding_in_pipeline_split',
    'account_for_loss_in_pipeline_split',
    'sequence_parallel',
    'group_query_attention',
    'multi_latent_attention',
    'swiglu',
    'bf16',
    'fp16',
    'full_validation',
    'decrease_batch_size_if_needed',
)


@dataclass(frozen=True)
class LaunchLine:
    """A launch line, parsed.

    Attributes:
        args: Megatron's arguments, not validated.
        unknown: words that Megatron's own parser does not know.
        lacks: why Megatron's own parser did not read it; empty: it did.
        world_size: processes of the job.
        on_cpu: whether it runs on the CPU.
        words: the script's own flags.
    """

    args: argparse.Namespace
    unknown: tuple[str, ...]
    lacks: str
    world_size: int
    on_cpu: bool
    words: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """One that raises."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f'launch line: {message}')


def read(words: Sequence[str], gpus: int | None = None) -> LaunchLine:
    """Parse a launch line.

    Args:
        words: `torchrun ... pretrain_gpt.py FLAG ...`, or the flags alone.
        gpus: of the job; default: what torchrun is given, or WORLD_SIZE, or as few as it takes.

    Raises:
        ValueError: words that make no sense.
    """
    launcher, script, flags = divided(words)
    _require_launcher(launcher, script, flags)
    lacks = _lacks()
    parser = _own_parser() if lacks else _megatrons_parser()
    on_cpu = '--cpu' in launcher
    given = [*(cpu_flags(flags) if on_cpu else ()), *flags]
    args, unknown, checks = parse(parser, parser.parse_known_args, given, where='launch line: ')
    with checks.one():
        require_spelt(unknown)
    checks.require_all()
    world_size = gpus or _processes(launcher) or _fewest(args)
    hinted = (
        () if lacks else tuple(_hinted(word, parser._option_string_actions) for word in unknown)
    )
    return LaunchLine(args, hinted, lacks, world_size, on_cpu, tuple(flags))


def _require_launcher(launcher: list[str], script: str | None, flags: list[str]) -> None:
    if script is None:
        return
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
    """Raise for a flag that nobody knows and that is nearly one of ours.

    Raises:
        ValueError: names both.
    """
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    for word in unknown:
        near = _nearest(word, parser._option_string_actions, _OURS)
        if near is not None:
            raise ValueError(f'launch line: {word} is not known: did you mean {near}?')


def _hinted(word: str, known: Collection[str]) -> str:
    near = _nearest(word, known, _THEIRS)
    return word if near is None else f'{word} (did you mean {near}?)'


def _nearest(word: str, known: Collection[str], cutoff: float) -> str | None:
    """Return the flag that is meant, by its likeness from 0 to 1; None: none, or no flag."""
    name = word.partition('=')[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near and name.startswith('--') else None


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


def _megatrons_parser() -> argparse.ArgumentParser:
    megatrons = importlib.import_module(TRAINING)
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
    for name in DRAWING:
        default = 0.1 if name.endswith('dropout') else None
        parser.add_argument(flag(name), type=float, nargs='?', const=True, default=default)
    parser.add_argument('--rampup-batch-size', nargs='*')
    parser.add_argument('--fp8-format', dest='fp8')
    parser.add_argument('--fp4-format', dest='fp4')
    parser.add_argument('--transformer-impl', default='transformer_engine')
    for name in rules_table.settings():
        if name not in ('fp8', 'fp4', 'transformer_impl', *_NUMBERS, *_SWITCHES):
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


def _fewest(args: argparse.Namespace) -> int:
    """Return processes of one replica of the model."""
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
