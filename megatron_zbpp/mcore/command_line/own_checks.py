"""Megatron's own checks of a launch line's sizes, asked before a job starts."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import re
import traceback
from argparse import Namespace
from dataclasses import fields

from megatron_zbpp.mcore.command_line.launch_line import SIZES, TRAINING, LaunchLine
from megatron_zbpp.mcore.command_line.messages import flag

# Words of checks that ask the machine: that of the job may be another one.
_OF_MACHINE = re.compile(r'environ|transformer.engine|\bTE\b|cuda|\bGPU', re.IGNORECASE)


def require_possible(args: Namespace) -> None:
    """Raise ValueError for sizes that no job has: 0, or heads and groups that do not divide."""
    given = {name: getattr(args, name, None) for name in SIZES}
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
    """Return what Megatron's validation says of another thing than sizes; empty: nothing.

    Args:
        line: whose layers are placed already, if that is ours to do.

    Raises:
        ValueError: Megatron refuses its sizes; the message names them.
    """
    args = copy.deepcopy(line.args)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _validate(args, line)
    except (Exception, SystemExit) as error:
        source = traceback.extract_tb(error.__traceback__)[-1].line or ''
        told = ' '.join(str(error).split()) or source
        words = {*re.findall(r'\w+', f'{told} {source}'.replace('-', '_'))}
        given = ((name, getattr(args, name, None)) for name in SIZES if name in words)
        wrong = [f'{flag(name)} {value}' for name, value in given if value is not None]
        if wrong and not _OF_MACHINE.search(f'{told} {source}'):
            raise ValueError(f'{", ".join(wrong)}: Megatron refuses it ({told})') from error
        return '' if line.lacks else f'validation by Megatron itself ends here: {told}'
    return ''


def _validate(args: Namespace, line: LaunchLine) -> None:
    """Let Megatron check its arguments; its config alone where it has no training loop."""
    if not line.lacks:
        training = importlib.import_module(TRAINING)
        args.rank, args.world_size = 0, line.world_size
        args.deterministic_mode = False  # which changes torch in this process
        training.validate_args(args)
        training.core_transformer_config_from_args(args)
        return
    from megatron.core.transformer import TransformerConfig

    known = {each.name for each in fields(TransformerConfig)} - {'pipeline_model_parallel_size'}
    given = {name: getattr(args, name, None) for name in SIZES if name in known}
    given['num_moe_experts'] = args.num_experts
    given['num_query_groups'] = args.num_query_groups if args.group_query_attention else None
    if all(given[name] for name in ('num_layers', 'hidden_size', 'num_attention_heads')):
        TransformerConfig(**{name: value for name, value in given.items() if value is not None})
