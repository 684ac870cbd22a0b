"""Schedules of papers that are here to be compared, or for times that few pipelines have."""

from __future__ import annotations

from functools import partial

from megatron_zbpp.schedules.construct.phases import zeropp_unit
from megatron_zbpp.schedules.registry import EVEN, TWO, Family, Formula

_two_way = partial(Family, placement='two-way', techniques=('two_way',))
_asynchronous = partial(
    Family,
    bubble=Formula('0 of a call', lambda at: 0),
    memory=Formula('p'),
    techniques=('updates',),
)


ROWS = (
    Family(
        '2bp',
        'zero_bubble:two_bp',
        summary='GPipe with a split backward: all F, all B, all W',
        bubble=Formula('(p-1)(F+B)'),
        memory=Formula('m'),
        source='2BP: 2-Stage Backpropagation, arXiv 2405.18047, section 3',
        when='to compare. `zb-h1` has less bubble in the memory of 1F1B.',
        aliases=('2BP-GPipe',),
    ),
    Family(
        '2bp-1f1b',
        'zero_bubble:two_bp_1f1b',
        summary='1F1B with a split backward whose W only fill waits',
        bubble=Formula('(p-1)(F+B-W) (m >= p)'),
        memory=Formula('m'),
        source='2BP: 2-Stage Backpropagation, arXiv 2405.18047, section 3',
        when='p <= m < 2p. Else `zb-h1` has the same bubble in the memory of 1F1B.',
        aliases=('2BP-1F1B-1', '2BP-1F1B-2'),
    ),
    Family(
        'merak',
        'techniques.recompute:merak',
        summary='1F1B that recomputes on all ranks but the last, one forward further ahead',
        bubble=Formula('mF + (p-2)(F+B+W) (F=B=W, m >= p, m >= 3)'),
        memory=Formula('1'),
        source='Merak, arXiv 2206.04959, as far as its abstract tells',
        when=(
            'everything has to run again. `--pipeline-recompute` does it to any schedule: `zb-v` '
            'and others have less bubble so, too.'
        ),
        aliases=('shifted-critical-path',),
        options=('costs',),
        min_ranks=2,
        techniques=('recompute',),
    ),
    Family(
        'varuna',
        'techniques.recompute:varuna',
        summary='forwards run ahead until a gradient is near; then R and its backward',
        bubble=Formula('at most mF + (p-1)(F+B+W) (F=B=W)'),
        memory=Formula('1'),
        source='Varuna, arXiv 2111.04007, section 3',
        when='to compare; `merak` is no slower here, and keeps fewer inputs.',
        options=('costs',),
        min_ranks=2,
        techniques=('recompute',),
    ),
    Family(
        'hanayo',
        'loops:hanayo',
        summary='waves: 2W chunks a rank, down and up the ranks',
        bubble=Formula('at most 4p(p-1)(F+B+W)/(3pv-2p+2) (F=B=W, m=p)'),
        memory=Formula('p', lambda at: min(at.p, at.m), at_most=True),
        source='Hanayo, arXiv 2308.15762',
        when=(
            'm is about p and the backward cannot be split. It sends 2W times the messages of '
            '1F1B (measured by others: a gain on fast links, a loss on slow ones). Else `zb-v` '
            'beats it.'
        ),
        aliases=('wave',),
        placement='wave',
        chunks=EVEN,
        options=('num_chunks',),
    ),
    Family(
        'zeropp',
        'loops:zeropp',
        summary='blocks of F, B and W, a unit of p microbatches at a time, for FSDP',
        bubble=Formula(
            '(p-1)(F+B)/v (F=B=W)',
            lambda at: (at.p - 1) * (at.F + at.B) / at.v,
            lambda at: at.m >= zeropp_unit(at.p, at.v) and at.equal,
        ),
        memory=Formula(
            'p + 2(p-1)/v',
            lambda at: zeropp_unit(at.p, at.v) + 2 * (at.p - 1) / at.v,
            lambda at: at.m >= 2 * zeropp_unit(at.p, at.v) and at.m % zeropp_unit(at.p, at.v) == 0,
        ),
        source='ZeroPP, arXiv 2402.03791, as far as its abstract tells',
        when=(
            'with FSDP and m too large for `breadth-first`, whose memory grows with m. Without '
            'FSDP `zb-interleaved` has less bubble in less memory.'
        ),
        options=('num_chunks',),
    ),
    _two_way(
        'chimera',
        'techniques.two_way:chimera',
        summary='1F1B down and up at the same time, on two copies of the weights',
        bubble=Formula('(m/p+1)(p-2)F (F=B=W, p divides m)'),
        memory=Formula('p', lambda at: min(at.p, at.m), lambda at: at.m % 2 == 0),
        source='Chimera, arXiv 2107.06925, section 3',
        when='to compare. `zb-v` on half the ranks, as two replicas, has less bubble.',
    ),
    _two_way(
        'chimera-zb',
        'techniques.two_way:chimera_zb',
        summary='Chimera with backwards split: its bubble no longer grows with the microbatches',
        bubble=Formula('at most (p-2)F (F=B=W, p divides m)'),
        memory=Formula('p', lambda at: min(at.p, at.m), lambda at: at.m % 2 == 0),
        source='Chimera, arXiv 2107.06925, with the split of arXiv 2401.10241',
        when='instead of `chimera`, always.',
    ),
    _two_way(
        'chimera-doubling',
        'techniques.two_way:chimera_doubling',
        summary='Chimera with forwards in pairs, for backwards that take twice as long',
        bubble=Formula('1.5(p-2)F (F=B=W, 2p divides m)'),
        memory=Formula('2p (2p divides m)'),
        source='Chimera, arXiv 2107.06925, section 3.5',
        when='to compare. `chimera-zb` has less bubble in half the memory.',
    ),
    _two_way(
        'gems',
        'techniques.two_way:gems',
        summary='one microbatch at a time, down and up by turns: the least memory, no speed',
        bubble=Formula('at most (p-1)(F+m(B+W)) (F <= B+W)'),
        memory=Formula('1'),
        source='GEMS, SC 2020',
        when='activations are what limits, whatever the time.',
    ),
    _two_way(
        'dualpipe',
        'techniques.two_way:dualpipe',
        summary='forwards and backwards of opposite ways paired, to overlap expert parallelism',
        bubble=Formula('(p/2-1)F (F=B=W, m >= 2p, 2 divides m)'),
        memory=Formula('p+1 (m >= 2p, 2 divides m)'),
        source='DualPipe, github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437',
        when=(
            'to compare. `dualpipe-v` on half the ranks, as two replicas, is the same in time, '
            'memory and weights.'
        ),
        options=('together',),
    ),
    _two_way(
        'bitpipe',
        'techniques.two_way:bitpipe',
        summary='Chimera with two chunks each way, in a V: half the bubble',
        bubble=Formula('(m/p+1)(p-2)F/2 (F=B=W, p divides m)'),
        memory=Formula('p (p divides m)'),
        source='BitPipe, arXiv 2410.19367',
        when='to compare. `zb-v` on half the ranks, as two replicas, has less bubble.',
        chunks=TWO,
    ),
    _asynchronous(
        'pipedream',
        'techniques.updates.orders:pipedream',
        summary='1F1B that never drains: each rank steps by itself, and keeps old weights',
        source='PipeDream, arXiv 1806.03377, section 3',
        when='to compare. It trains another model: gradients of rank s are (p-1-s)/m steps late.',
    ),
    _asynchronous(
        'pipedream-2bw',
        'techniques.updates.orders:pipedream_2bw',
        summary='1F1B that never drains, all gradients one step late, two copies of the weights',
        source='PipeDream-2BW, arXiv 2006.09503',
        when=(
            'm is about p and cannot grow. From 2p microbatches on `zb-v` with post-validation '
            'has no bubble either, and trains the same model as Megatron.'
        ),
        aliases=('2bw',),
    ),
    _asynchronous(
        'paci',
        'techniques.updates.orders:paci',
        summary='1F1B that never drains, with one copy of the weights: backwards use the newest',
        source='PACI, arXiv 2606.07881',
        when='to compare. It trains another model: forwards of rank s are (p-1-s)/m steps late.',
    ),
    _asynchronous(
        'pipemare',
        'techniques.updates.orders:pipemare',
        summary='PACI whose backwards correct the newest weights towards those of their forwards',
        source='PipeMare, arXiv 1910.05124',
        when='to compare. It trains another model: forwards of rank s are (p-1-s)/m steps late.',
    ),
    _asynchronous(
        'wpipe',
        'techniques.updates.orders:wpipe',
        summary=(
            'two chunks a rank: the first half of the model one step late, the second not at all'
        ),
        bubble=Formula('little of a call, by list scheduling', lambda at: 0),
        memory=Formula('at most 2p'),
        source='WPipe, ICLR 2022',
        when=(
            'to compare. It trains another model, of which half has no delay; by `wpipe-joint`, '
            "since Megatron's optimizer steps both halves at once."
        ),
        chunks=TWO,
    ),
    _asynchronous(
        'wpipe-joint',
        'techniques.updates.orders:wpipe_joint',
        summary='wpipe whose halves step at once, as optimizers of Megatron do: trains the same',
        bubble=Formula('a fifth of a call at m = p, by list scheduling', lambda at: 0),
        memory=Formula('at most 3.5p'),
        source='WPipe, ICLR 2022; the order is ours',
        when='to compare. It trains another model, of which half has no delay.',
        chunks=TWO,
    ),
)
