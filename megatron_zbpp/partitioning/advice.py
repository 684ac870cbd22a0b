"""The best setups of a job, and the flags that run them.

All setups that are possible are simulated in the order of their lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.setup_costs import FULL, NONE, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.setup_prediction import Prediction, Stages, predict, stages_of
from megatron_zbpp.planner.limits import by_bound
from megatron_zbpp.schedules import find

# Flags that a setup gives itself or whose values are of another setup: with a value, and without.
REPLACED = (
    'tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size '
    'micro-batch-size num-layers-per-virtual-pipeline-stage '
    'num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout '
    'decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers '
    'recompute-granularity recompute-method recompute-num-layers recompute-modules'
).split()
SWITCHES = ('--sequence-parallel', '--recompute-activations', '--distribute-saved-activations')
_AGAIN = {
    FULL: '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1',
    SELECTIVE: '--recompute-granularity selective --recompute-modules',
}


def modules_again(job: Job) -> tuple[str, ...]:
    """Return the modules that selective recomputation is about, as Megatron's flag names them."""
    if not job.fused:
        return ('core_attn',)
    shape = job.shape
    dense = not shape.experts or shape.dense_first
    return (*(['mlp'] if dense else []), *(['moe'] if shape.experts else []))


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
    """Return the command that starts a script: torchrun, a process for each GPU."""
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


# Schedules that hold less than another one and idle more: weighed where that one does not fit.
_SPARING: dict[str, str] = dict.fromkeys(('v-half', 'v-min', 'po-h', 'po-f'), 'zb-v')
SCHEDULES = ('1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zb-v', 'zb-interleaved', *_SPARING)
# Options that hold a size of all setups, by the field of `Setup`.
HELD = {'pp': '--pp', 'tp': '--tp', 'chunks': '--vpp', 'ep': '--ep', 'micro_batch': '--micro-batch'}
_TRIED = {'chunks': (2, 3, 4, 5, 6, 8), 'micro_batch': (1, 2, 4, 8, 16)}


class Advice(NamedTuple):
    """Setups of a job."""

    best: tuple[Prediction, ...]  # that fit, the fastest first
    possible: int  # number of setups that were weighed
    simulated: int  # number of those that were simulated
    # the iteration of the launch line's own setup; None: there is none
    own: Prediction | None = None
    least: Prediction | None = None  # the one that takes the least memory, where nothing fits


def advise(
    job: Job,
    schedules: Sequence[str] = SCHEDULES,
    own: Setup | None = None,
    count: int = 10,
    done: Callable[[float], None] = lambda share: None,
    held: Mapping[str, int] = {},
) -> Advice:
    """Return the `count` fastest setups that fit.

    `own` is the setup of the launch line, weighed beside all others; `held` are sizes that all
    setups have, by the fields of `Setup`.
    """
    kept = None if own is None else predict(job, own)
    setups = list(setups_of(job, schedules, held))
    if own is not None and own not in setups and _has(own, held):
        setups.append(own)
    found: dict[Setup, Stages] = {}
    for setup in setups:
        with suppress(ValueError):  # it is not possible
            found[setup] = stages_of(job, setup)
    if not found:
        sizes = ', '.join(f'{HELD[name]} {size}' for name, size in held.items())
        raise ValueError(
            f'{job.gpus} GPUs, a batch of {job.global_batch} and {job.shape.layers} layers do not '
            f'divide into any setup{sizes and f" with {sizes}"}: give --gpus, --global-batch-size '
            f'or --num-layers that divide by more{sizes and ", or other sizes, or --schedules"}'
        )
    fit = {setup: stages for setup, stages in found.items() if stages.least <= job.room}
    made: dict[Setup, Prediction | None] = {}
    best: list[Prediction] = []

    def prediction(setup: Setup) -> Prediction | None:
        with suppress(ValueError):  # its schedule takes no such microbatches
            return predict(job, setup, found[setup])
        return None

    def slowest() -> float:  # that a bound must be below
        return best[-1].seconds if len(best) == count else inf

    for sparing in (False, True):
        bounds = (
            (stages.bound(job.microbatches(setup)), setup)
            for setup, stages in fit.items()
            if (setup.schedule in _SPARING) == sparing
        )
        for setup in by_bound(bounds, slowest):
            if sparing and setup != own:
                other = made.get(replace(setup, schedule=_SPARING[setup.schedule], chunks=2))
                if other is not None and max(other.nbytes) <= job.room:
                    continue
            one = made[setup] = kept if setup == own else prediction(setup)
            if one is not None and max(one.nbytes) <= job.room:
                best = sorted([*best, one], key=lambda each: (each.seconds, max(each.nbytes)))
                best = best[:count]
            done(min(1.0, len(made) / len(fit)))
    least: Prediction | None = None

    def fullest() -> float:
        return inf if least is None else max(least.nbytes)

    bounds = ((stages.least, setup) for setup, stages in (() if best else found.items()))
    for setup in by_bound(bounds, fullest):
        one = prediction(setup)
        if one is not None and max(one.nbytes) < fullest():
            least = one
    return Advice(tuple(best), len(found), len(made), kept, least)


def _has(setup: Setup, held: Mapping[str, int]) -> bool:
    return all(getattr(setup, name) == size for name, size in held.items())


def setups_of(job: Job, schedules: Iterable[str], held: Mapping[str, int] = {}) -> Iterator[Setup]:
    """Yield all setups with the `held` sizes that the GPUs, the batch and the model divide into."""
    tried = {name: [held[name]] if name in held else [*few] for name, few in _TRIED.items()}
    shape, names = job.shape, [find(name) for name in dict.fromkeys(schedules)]
    savings = (NONE,) if shape.model == 'hybrid' else (NONE, SELECTIVE, FULL)
    for tp, ep, pp in _sizes(job):
        runs = [('1f1b', 1)] if pp == 1 else []
        for family in names if pp > 1 else ():
            chunks = [family.default_chunks]
            if 'num_chunks' in family.options:
                chunks = [v for v in tried['chunks'] if v in family.chunks]
            runs += [(family.name, v) for v in chunks if pp >= family.min_ranks]
        for (name, v), micro, saving in product(runs, tried['micro_batch'], savings):
            setup = Setup(tp, pp, v, ep, micro, name, saving, tp > 1)
            room = pp * v <= shape.layers + sum(job.ends)
            if room and _has(setup, held) and not job.why_impossible(setup):
                yield setup


def _sizes(job: Job) -> Iterator[tuple[int, int, int]]:
    shape = job.shape
    for tp in _divisors(job.gpus):
        fits = tp <= job.gpus_per_node and not shape.seq % tp and not (shape.ffn or tp) % tp
        for pp in _divisors(job.gpus // tp) if fits else ():
            if pp > shape.layers + sum(job.ends) or job.gpus % (tp * pp * job.cp):
                continue
            for ep in _divisors(shape.experts) if shape.experts else (1,):
                yield tp, ep, pp


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if not number % k]


def with_measured(job: Job, measured: tuple[float, float, float], setup: Setup) -> Job:
    """Return the job with layers that take as long as was measured.

    `measured` are seconds of F, B and W of all layers for one microbatch on one rank, with `setup`.
    """
    stages = stages_of(job, setup)
    own = [sum(stages.costs.times[kind]) for kind in 'FBW']
    if not all(measured) or not all(own):
        raise ValueError('measured layers take no time in F, B or W: give a file with all three')
    f, b, w = (took / made for took, made in zip(measured, own, strict=True))
    return replace(job, factors=(f, b, w))


def with_layers(job: Job, own: Setup, layers: Layers) -> Job:
    """Return the job with the times of measured layers, and products as fast as these tell.

    `layers` are in seconds, measured with the setup `own`, with an embedding and a loss.
    """
    if len(layers) != job.shape.layers + job.shape.mtp + 2:
        raise ValueError(
            f'--layers-file has {len(layers)} layers, the launch line {job.shape.layers} and '
            f'{job.shape.mtp} of multi-token prediction, an embedding and a loss: give its own'
        )
    times = zip(*((each.forward, each.backward, each.weight) for each in layers), strict=True)
    forward, backward, weight = map(sum, times)
    measured = forward + backward + weight
    slow, fast = (
        sum(map(sum, stages_of(_at_rate(job, tflops), own).costs.times.values()))
        for tflops in (1.0, 2.0)
    )
    products = 2 * (slow - fast)  # at 1 TFLOP/s
    talk = slow - products
    if not measured > talk:
        raise ValueError(
            f'--within {job.within:g}, --between {job.between:g}: communication alone would take '
            f'{talk:.3g} s a microbatch, and all of --layers-file {measured:.3g} s: give the rates '
            'of the links that it was measured on'
        )
    rated = _at_rate(job, products / (measured - talk))
    return with_measured(rated, (forward, backward, weight), own)


def _at_rate(job: Job, tflops: float) -> Job:
    return replace(job, shape=replace(job.shape, tflops=tflops))
