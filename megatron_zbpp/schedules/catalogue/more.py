"""Schedules for a particular need: FSDP, slow links, long sequences, little memory."""

from __future__ import annotations

from functools import partial

from megatron_zbpp.schedules.catalogue.recommended import SLOTTED_BUBBLE, interleaved_peak
from megatron_zbpp.schedules.construct.phases import even_groups, gis_h_group
from megatron_zbpp.schedules.registry import Family, Formula, Sizes, filled, steady

_sliced = partial(
    Family,
    memory=Formula('(p+n-1)/n', lambda at: min((at.p + at.n - 1) / at.n, at.m)),
    options=('num_slices',),
    techniques=('slices',),
)


def _gis_peak(at: Sizes, size: int) -> float:
    """Return ((v-1)g + p)/v, where g is the largest of even groups of at least `size`."""
    return ((at.v - 1) * even_groups(at.m, size)[0] + at.p) / at.v


ROWS = (
    Family(
        'gpipe',
        'whole_backwards:gpipe',
        summary='all forwards, then all backwards',
        bubble=Formula('(p-1)(F+B+W)'),
        memory=Formula('m'),
        source='GPipe, arXiv 1811.06965, section 2.3',
        when=(
            'as a baseline, or with very few microbatches. `1f1b` takes the same time in less '
            'memory.'
        ),
        aliases=('ScheduleGPipe', 'FThenB', 'AFAB', 'all-forward-all-backward'),
    ),
    Family(
        '1f1b-pb',
        'whole_backwards:one_f_one_b_pb',
        summary='1F1B with about twice the warm-up: each message has a pass of time; more memory',
        bubble=Formula('(p-1)(F+B+W)'),
        memory=Formula('2p-1, or the limit', lambda at: min(2 * at.p - 1, at.m)),
        source='DAPPLE, arXiv 2007.01045, section 3.2, warm-up policy B',
        when='one chunk a rank on slow links, and the backward cannot be split.',
        aliases=('DAPPLE-PB', '1f1b-eager', 'eager-1f1b'),
        options=('costs', 'memory_limit'),
    ),
    Family(
        'kfkb',
        'whole_backwards:kfkb',
        summary='k forwards and k backwards by turns, k chosen for the messages',
        bubble=Formula('(p-1)(F+B+W)'),
        memory=Formula('2p, or the limit', lambda at: min(2 * at.p, at.m)),
        source='Ada-Grouper, arXiv 2303.01675',
        when=(
            'links are slow, the backward cannot be split, and there is memory for two of 1F1B or '
            'more. Else `zb-2p` hides messages in the same memory and has less bubble. `auto` '
            'weighs it with the messages that it has measured.'
        ),
        aliases=('Ada-Grouper',),
        options=('costs', 'memory_limit'),
    ),
    Family(
        'bpipe',
        'techniques.evict:b_pipe',
        summary='1F1B whose first ranks keep activations on the last ones, which have room',
        bubble=Formula('(p-1)(F+B+W)'),
        # ceil((p+2)/2), and n-1 further slices of n
        memory=Formula(
            'floor((p+3)/2)',
            lambda at: min(((at.p + 3) // 2 + at.n - 1) / at.n, at.m) if at.p > 1 else 1,
            lambda at: at.n == 1,
            at_most=True,
        ),
        source='BPipe, ICML 2023',
        when='links within a pair are fast and memory is what limits; it promises no speed.',
        aliases=('memory-balanced-pipeline',),
        options=('num_slices',),
        techniques=('evict',),
    ),
    Family(
        'breadth-first',
        'loops:breadth_first',
        summary='chunk by chunk through all microbatches, for FSDP',
        bubble=Formula('(p-1)(F+B+W)/v (m >= p)'),
        memory=Formula('m'),
        source='Breadth-First Pipeline Parallelism, arXiv 2211.05953, section 4',
        when=(
            'with FSDP and a small m: the weights of a chunk are needed in one stretch for the '
            'forward and one for the backward, so they are gathered twice a step whatever m is. '
            'For anything else `interleaved` has the same bubble in less memory.'
        ),
        aliases=('LoopedBFS', 'ScheduleLoopedBFS', 'BFPP'),
        options=('num_chunks',),
    ),
    Family(
        'zb-h2',
        'zero_bubble:zb_h2',
        summary='no bubble in any window, for twice the memory; needs post-validation',
        bubble=Formula('(p-1)(F+B-2W) (m >= 2p-1, F+B >= 2W)'),
        memory=Formula('2p-1', lambda at: min(2 * at.p - 1, at.m)),
        source='Zero Bubble, arXiv 2401.10241, section 2.3.2',
        when=(
            'only with the optimizer barrier removed (post-validation) and memory to spare. With '
            'the barrier it buys nothing over `zb-h1`; `zb-v` reaches the same in half the '
            'memory.'
        ),
        aliases=('h2',),
    ),
    Family(
        'zb-1p',
        'zb_auto:zb_1p',
        summary='automatic order for measured times, in the memory of 1F1B',
        bubble=Formula('(p-1)(F+B-W) (F=B=W, m >= 2p)'),
        memory=Formula('p, or the limit', lambda at: min(at.p, at.m)),
        source='Zero Bubble, arXiv 2401.10241, section 3.1',
        when=(
            'on a loop placement with one stage a rank, for measured times. A limit below p makes '
            'it collapse (p=8, m=16: worse than 1F1B at 7): use `v-half` there.'
        ),
        aliases=('zero-bubble-heuristic',),
        options=('costs', 'memory_limit'),
    ),
    Family(
        'v-min',
        'v_controlled:v_min',
        summary='(p+4)/3 of the p activations of 1F1B, on a V placement; poor where F, B, W differ',
        bubble=Formula(
            'at most (4p-5)F/2 (F=B=W)',
            lambda at: (4 * at.p - (5 if at.p % 3 else 7)) / 2 * at.F,
            steady,
            at_most=True,
        ),
        memory=Formula('floor((p+4)/3)', lambda at: min((at.p + 4) // 3, at.m)),
        source='Controllable Memory, arXiv 2405.15362',
        when=(
            'F, B and W take the same time, or nothing else fits. Where they differ, which is the '
            'normal case, every microbatch adds some bubble and it does not vanish with m: at p = '
            "8, m = 64 and 1/1.2/0.8 it is .21 of the makespan, and 1F1B's .10 (`comparable "
            'throughput` in the paper means that). `v-half` does not have this flaw. Twice the '
            'messages of 1F1B.'
        ),
        aliases=('min',),
        placement='v',
    ),
    Family(
        '1f1b-v',
        'v_controlled:v_1f1b',
        summary='1F1B on a V placement: less memory without the B/W split',
        bubble=Formula('at most (5p-5)F/2 (F=B=W, m >= 2p)'),
        memory=Formula('floor(2p/3)+1', lambda at: min(2 * at.p // 3 + 1, at.m)),
        source='Controllable Memory, arXiv 2405.15362, appendix',
        when='the backward cannot be split, and memory counts. Else `v-half` has less of both.',
        aliases=('v-1f1b',),
        placement='v',
    ),
    Family(
        'gis',
        'loops:gis',
        summary='interleaved with B sent before W, in the memory of 1F1B',
        bubble=Formula('(p-1)(F+B)/v (F=B=W, m >= p)'),
        memory=Formula('p', lambda at: _gis_peak(at, at.p), filled),
        source='PipeOffload, arXiv 2503.01328',
        when=(
            'instead of `interleaved` where the backward can be split: less memory and less '
            'bubble. `zb-interleaved` has less bubble still in the same memory; what GIS has over '
            'it is that no W waits, which is simpler to offload and to account for.'
        ),
        aliases=('group-interleaved-1f1b', 'grouped-interleaving'),
        options=('num_chunks',),
    ),
    Family(
        'gis-h',
        'loops:gis_h',
        summary='interleaved in groups of half the size, towards half the memory',
        bubble=Formula(
            '((p-1)(F+B) + (p-g)(v-1)(F+B-W))/v, g = ceil(p/2)',
            lambda at: (
                (
                    (at.p - 1) * (at.F + at.B)
                    + (at.p - gis_h_group(at.p)) * (at.v - 1) * (at.F + at.B - at.W)
                )
                / at.v
            ),
            lambda at: filled(at) and at.equal and at.m % gis_h_group(at.p) == 0,
        ),
        memory=Formula('(g(v-1) + p)/v', lambda at: _gis_peak(at, gis_h_group(at.p)), filled),
        source='PipeOffload, arXiv 2503.01328',
        when=(
            'memory is short, messages are cheap and v is large: with v = 4 it has less bubble '
            'than `v-half` at about its memory, with v = 2 more of both.'
        ),
        options=('num_chunks',),
    ),
    Family(
        'po-h',
        'techniques.offload:po_h',
        summary='PO with half of the chunks of each rank on the host between F and B',
        bubble=SLOTTED_BUBBLE,
        memory=Formula('at most ((v+2)p/8 + 3)/v'),
        source='PipeOffload, arXiv 2503.01328',
        when='memory is short and a copy both ways takes up to twice the time that it computes.',
        aliases=('PipeOffload-half',),
        options=('num_chunks', 'costs', 'num_slices'),
        techniques=('offload',),
    ),
    Family(
        'po-f',
        'techniques.offload:po_f',
        summary='PO with all that has the time on the host between F and B',
        bubble=SLOTTED_BUBBLE,
        memory=Formula('at most 4/v'),
        source='PipeOffload, arXiv 2503.01328',
        when=(
            'long sequences or wide layers, where a copy both ways takes no longer than it '
            'computes.'
        ),
        aliases=('PipeOffload-full',),
        options=('num_chunks', 'costs', 'num_slices'),
        techniques=('offload',),
    ),
    Family(
        'dualpipe-v',
        'v_controlled:dualpipe_v',
        summary='forwards and backwards paired to overlap expert parallelism, on a V placement',
        bubble=Formula('(p-1)F/2 (F=B=W, m >= 2p)'),
        memory=Formula('p + 1/2', lambda at: min(at.p + 0.5, at.m), lambda at: at.m >= 2 * at.p),
        source='DualPipe, github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437',
        when=(
            'with expert parallelism and a model that overlaps the pairs. Otherwise `zb-v` has '
            'the same makespan, no bubble in its windows and less memory (some unequal times '
            'excepted: with a heavy last stage this order happens to lose little).'
        ),
        aliases=('ScheduleDualPipeV',),
        placement='v',
        options=('together',),
    ),
    Family(
        'stp',
        'v_controlled:stp',
        summary='forwards paired with F, B or W, to overlap tensor parallelism, on a V placement',
        bubble=Formula('F/2 (F=B=W, m >= 3p-1)'),
        memory=Formula('2p - 1/2 (m >= 3p-1)'),
        source='STP, arXiv 2510.27257',
        when=(
            'tensor parallelism whose communication cannot be hidden within a pass, and a model '
            'that overlaps the pairs. Otherwise `zb-v` has the same makespan and half the memory.'
        ),
        placement='v',
        options=('together',),
    ),
    _sliced(
        'seq1f1b',
        'techniques.slices.place:seq1f1b',
        summary='1F1B over slices of sequences: an n-th of the bubble, in less memory',
        bubble=Formula('(p-1)(F+B+W)/n'),
        source='Seq1F1B, arXiv 2406.03488, section 3',
        when=(
            'sequences are long and microbatches few. Each message and each kernel has an n-th of '
            'the work, so slices of a few thousand tokens are the shortest that pay.'
        ),
    ),
    _sliced(
        'seq1f1b-zb',
        'techniques.slices.place:seq1f1b_zb',
        summary="ZB-H1 over slices of sequences: an n-th of its bubble, in Seq1F1B's memory",
        bubble=Formula('(p-1)(F+B-W)/n (mn >= 2p-2+n)'),
        source='Seq1F1B, arXiv 2406.03488, with ZB-H1 of arXiv 2401.10241',
        when=(
            'instead of `seq1f1b`, always. Attention has no W: the longer the sequence, the '
            'smaller the gain.'
        ),
    ),
    _sliced(
        'seq-zb-v',
        'techniques.slices.place:seq_zb_v',
        summary='ZB-V over slices of sequences: no bubble in any window, with few microbatches too',
        bubble=Formula('0 (F=B=W, mn >= 2p-2+n)'),
        source='Seq1F1B, arXiv 2406.03488, with ZB-V of arXiv 2401.10241',
        when='long sequences with fewer than 2p microbatches, where `zb-v` has a bubble.',
        placement='v',
    ),
    Family(
        'seq1f1b-interleaved',
        'techniques.slices.place:seq1f1b_interleaved',
        summary='interleaved 1F1B over slices of sequences: an nv-th of the bubble of 1F1B',
        bubble=Formula('(p-1)(F+B+W)/(nv) (mn >= p)'),
        memory=Formula('1 + 2(p-1)/(nv), n >= p', interleaved_peak),
        source='Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv 2504.14519',
        when=(
            'the memory of one microbatch is what limits. `zb-interleaved` with `--slices` has a '
            'third of the bubble (F=B=W) in no more memory.'
        ),
        aliases=('seq1f1b-i',),
        options=('num_chunks', 'num_slices'),
        techniques=('slices',),
    ),
    Family(
        'slimpipe',
        'techniques.vocabulary.place:slimpipe',
        summary=(
            'interleaved 1F1B over equal slices, the output layer on all ranks: the activations of '
            'about one microbatch'
        ),
        bubble=Formula('at most (p-1)(F+B+W)/(nv) (2F=B+W, mn >= p)'),
        memory=Formula('at most 1 + (2p-2+v)/(nv) (n >= p)'),
        source='SlimPipe, arXiv 2504.14519',
        when=(
            'long sequences, a large vocabulary, and memory for one microbatch. `zb-v` with '
            'slices and shards has less bubble in more memory.'
        ),
        options=('num_chunks', 'costs', 'num_slices'),
        techniques=('slices', 'vocabulary'),
    ),
)
