"""Flags of Megatron and ours that run a setup, and the flags that they take the place of."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zbpp.partitioning.advise.job import FULL, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.advise.layer_costs import modules_again
from megatron_zbpp.schedules import find

# Flags that a setup gives itself or whose values are of another setup: with a value, and without.
REPLACED = tuple(
    (
        'tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size '
        'micro-batch-size num-layers-per-virtual-pipeline-stage '
        'num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout '
        'decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers '
        'recompute-granularity recompute-method recompute-num-layers recompute-modules'
    ).split()
)
SWITCHES = ('--sequence-parallel', '--recompute-activations', '--distribute-saved-activations')
_AGAIN = {
    FULL: '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1',
    SELECTIVE: '--recompute-granularity selective --recompute-modules',
}


def flags_of(job: Job, setup: Setup) -> list[str]:
    """Return the flags of a setup, in words."""
    sizes = {'tensor-model-parallel': setup.tp, 'pipeline-model-parallel': setup.pp}
    sizes |= {'expert-model-parallel': setup.ep} if job.shape.experts else {}
    sizes |= {'micro-batch': setup.micro_batch}
    found = [word for name, size in sizes.items() for word in (f'--{name}-size', str(size))]
    if setup.sequence_parallel and setup.tp > 1:
        found.append('--sequence-parallel')
    family = find(setup.schedule)
    if family.name == 'interleaved' or setup.chunks != family.default_chunks:
        found += ['--num-virtual-stages-per-pipeline-rank', str(setup.chunks)]
    found += _AGAIN.get(setup.saving, '').split()
    found += modules_again(job) if setup.saving == SELECTIVE else ()
    return found + ([] if setup.schedule in STOCK else ['--pipeline-schedule', setup.schedule])


def processes(launcher: Sequence[str], gpus: int, per_node: int) -> list[str]:
    """Return what starts a script, torchrun with as many processes as there are GPUs."""
    if not any(word.rpartition('/')[2] == 'torchrun' for word in launcher):
        return list(launcher)
    at = next(k for k, word in enumerate(launcher) if word.rpartition('/')[2] == 'torchrun') + 1
    kept: list[str] = []
    words = iter(launcher[at:])
    for word in words:
        name = word.partition('=')[0].replace('_', '-')
        if name in ('--nproc-per-node', '--nnodes'):
            _ = next(words) if '=' not in word else None
        else:
            kept.append(word)
    each = min(gpus, per_node)
    nodes = ['--nnodes', str(gpus // each)] if gpus > each else []
    return [*launcher[:at], *nodes, '--nproc-per-node', str(each), *kept]
