"""Both partners of a pair on one node: which rank each started process becomes.

Megatron counts ranks through the tensor-, context- and data-parallel ones of a stage before it
comes to the next stage. torchrun counts processes node by node. BPipe moves activations between the
first and the last stage, the second and the last but one, and so on, which so are nodes apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, MutableMapping, Sequence
from math import gcd


def rank_for(words: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Return the rank that this process becomes.

    Args:
        words: of the script: Megatron's flags.
        environ: what torchrun has set.

    Raises:
        ValueError: pairs of these sizes do not fit nodes; the message names the cure.
    """
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

    Args:
        world: ranks in all.
        stages: pipeline ranks.
        tensor: ranks that must stay beside each other.
        local: processes on a node.

    Raises:
        ValueError: a node cannot hold both of a pair.
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
