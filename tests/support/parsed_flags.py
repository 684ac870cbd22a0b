"""Our flags, parsed on ranks behind a parser that stands for Megatron's."""

import argparse
import sys
from dataclasses import dataclass, replace
from unittest import mock

from outcome import of_all, outcome, refusal

# Megatron's own defaults of what our flags look at: where layers are placed, and sizes
PLACED = {
    'pipeline_model_parallel_layout': None,
    'account_for_embedding_in_pipeline_split': False,
    'account_for_loss_in_pipeline_split': False,
    'num_layers_per_virtual_pipeline_stage': None,
    'num_virtual_stages_per_pipeline_rank': None,
}
MEGATRONS = PLACED | {
    'num_layers': 4,
    'pipeline_model_parallel_size': 2,
    'tensor_model_parallel_size': 1,
    'context_parallel_size': 1,
    'micro_batch_size': 1,
    'global_batch_size': 4,
}


@dataclass(frozen=True)
class Parsed:
    """What the plugin was enabled with, and where the layers are placed."""

    source: object
    placed: dict[str, object]


def parse(flags, changes):
    """On each rank: our flags behind a parser that stands for Megatron's, on two ranks."""
    from megatron_zbpp.launch import flags as ours
    from megatron_zbpp.mcore import enabled

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument('--num-layers', type=int)
    parser.add_argument('--hidden-size', '--width', type=int)
    parser.add_argument('--kind', choices=('a', 'b'))
    ours.add_arguments(parser)
    parser.set_defaults(**{**MEGATRONS, **changes})
    parser.parse_known_args = ours._preparing(parser)
    enabled.plugin = None
    with mock.patch.object(sys, 'argv', ['script.py']):
        found = outcome(parser.parse_args, list(map(str, flags)))
    plugin = enabled.plugin
    if plugin is not None:
        plugin.disable()
    if found.code is not None:
        return found
    placed = {name: getattr(found.result, name) for name in PLACED}
    source = plugin and plugin.session.programs.source
    if isinstance(source, tuple):  # of a family, of whole sequences
        source = source[:-1] if source[-1] == 1 else source
    return replace(found, result=Parsed(source, placed))


def parsed(ranks, *flags, **changes):
    return of_all(ranks(2).run(parse, flags, changes))


def refused(ranks, *flags, **changes):
    return refusal(parsed(ranks, *flags, **changes))
