"""Schedules that a user should look at: for most pipelines one of these is the best."""

from __future__ import annotations

from megatron_zbpp.schedules.construct.phases import even_groups
from megatron_zbpp.schedules.registry import Family, Formula, Sizes, filled, steady

SLOTTED_BUBBLE = Formula('at most (p-1)(F+B+W) (F=B=W, m >= 2p)')


def interleaved_peak(at: Sizes) -> float:
    """Return the activations on rank 0, in groups of whole microbatches, of p slices or more."""
    largest = at.n * even_groups(at.m, -(-at.p // at.n))[0]
    stride = 2 if at.v > 1 else 1
    return min(at.m, ((at.v - 1) * largest + at.n + stride * (at.p - 1)) / (at.n * at.v))


ROWS = (
    Family(
        '1f1b',
        'whole_backwards:one_f_one_b',
        summary='one forward and one backward by turns: the reference',
        bubble=Formula('(p-1)(F+B+W)'),
        memory=Formula('p', lambda at: min(at.p, at.m)),
        source='PipeDream-2BW, arXiv 2006.09503, section 3.2; DAPPLE, arXiv 2007.01045',
        when=(
            'as the reference. `zb-h1` has a third of its bubble (F=B=W) in the same memory. It '
            'is still the choice where the backward cannot be split, or where m is so large that '
            '(p-1)/m is small.'
        ),
        aliases=('PipeDream-Flush', 'DAPPLE', 'Schedule1F1B', 'without-interleaving'),
    ),
    Family(
        'interleaved',
        'loops:interleaved',
        summary='1F1B over several chunks a rank, a v-th of the bubble',
        bubble=Formula('(p-1)(F+B+W)/v (m >= p)'),
        memory=Formula('p + (p-1)/v', lambda at: interleaved_peak(at._replace(n=1))),
        source='Megatron-LM, arXiv 2104.04473, section 2.2',
        when=(
            'with fast links and p small against m. It sends v times the messages of 1F1B; '
            'measured gains (Zero Bubble, table 4) stay well below what the bubble promises. '
            '`zb-interleaved` has a third of the bubble (F=B=W) in less memory. With v = 1 it is '
            '1F1B.'
        ),
        aliases=(
            'Interleaved1F1B',
            'ScheduleInterleaved1F1B',
            'with-interleaving',
            '1F1B-Interleaved',
            '1F1B-I',
            'VPP',
        ),
        options=('num_chunks',),
    ),
    Family(
        'zb-h1',
        'zero_bubble:zb_h1',
        summary='1F1B with deferred weight gradients, in the memory of 1F1B',
        bubble=Formula('(p-1)(F+B-W) (m >= 2p-1)'),
        memory=Formula('p', lambda at: min(at.p, at.m)),
        source='Zero Bubble, arXiv 2401.10241, section 2.3.1',
        when=(
            'instead of 1F1B, always: same memory on the worst rank, same communication. `zb-v` '
            'has half its idle GPU time where F=B=W, for twice the communication.'
        ),
        aliases=('zero-bubble', 'zbb', 'h1'),
    ),
    Family(
        'zb-2p',
        'zb_auto:zb_2p',
        summary='automatic order for measured times, in twice that memory; needs post-validation',
        bubble=Formula('about 0', lambda at: 0.0, steady),
        memory=Formula('2p, or the limit', lambda at: min(2 * at.p, at.m)),
        source='Zero Bubble, arXiv 2401.10241, section 3.1',
        when=(
            'with the optimizer barrier removed (post-validation) and memory to spare. With the '
            'barrier it buys next to nothing over `zb-1p`, and `zb-v` is better in half the '
            'memory.'
        ),
        options=('costs', 'memory_limit'),
    ),
    Family(
        'zb-v',
        'zero_bubble:zb_v',
        summary='no bubble in any window, in the memory of 1F1B, on a V placement',
        bubble=Formula('0 (F=B=W, m >= 2p-1)'),
        memory=Formula('p', lambda at: min(at.p, at.m)),
        source='Zero Bubble, arXiv 2401.10241, section 6',
        when=(
            'the first choice at the memory of 1F1B. It sends twice the messages (none at the '
            'fold on rank p-1), and F, B and W that differ bring some bubble back (p=8, m=24, '
            '1/1.2/0.8: 5.5 % of the makespan), which a planned schedule avoids. `zb-interleaved` '
            'with more chunks can be better still where messages cost little.'
        ),
        aliases=('ZBVZeroBubble', 'ScheduleZBVZeroBubble', 'V-ZB', 'zbv-formatted', 'ZBVPP', 'zb'),
        placement='v',
    ),
    Family(
        'v-half',
        'v_controlled:v_half',
        summary=(
            'less than half the bubble of 1F1B in (p+2)/2 of its p activations, on a V placement'
        ),
        bubble=Formula(
            '(3p-7)F/2 even p, (3p-4)F/2 odd p (F=B=W)',
            lambda at: max(0, 3 * at.p - (4 if at.p % 2 else 7)) / 2 * at.F,
            steady,
        ),
        memory=Formula('floor((p+2)/2)', lambda at: min((at.p + 2) // 2, at.m)),
        source='Controllable Memory, arXiv 2405.15362',
        when=(
            'memory is short and m is large. F, B and W that differ cost it little: the bubble '
            'still vanishes with m. Twice the messages of 1F1B.'
        ),
        aliases=('half',),
        placement='v',
    ),
    Family(
        'zb-interleaved',
        'loops:zb_interleaved',
        summary='interleaved 1F1B with deferred weight gradients',
        bubble=Formula('(p-1)(F+B-W)/v (F=B=W, m >= p)'),
        memory=Formula(
            'p', lambda at: ((at.v - 1) * even_groups(at.m, at.p)[0] + at.p) / at.v, filled
        ),
        source='Zero Bubble, arXiv 2401.10241, section 2.3.1, on the loop placement, as in torch',
        when=(
            'layers divide into many chunks and links are fast: from v = 3 on its makespan is '
            "shorter than `zb-v`'s in the same memory, also where F, B and W differ (p=8, m=24, "
            '1/1.2/0.8, v=4: 3.3 % bubble). It sends v times the messages of `zb-h1`, and its '
            'short warm-up hides none of their latency; at a tenth of F a message that lead is '
            'gone. With v = 1 it is ZB-H1.'
        ),
        aliases=('InterleavedZeroBubble', 'ScheduleInterleavedZeroBubble'),
        options=('num_chunks',),
    ),
    Family(
        'po',
        'techniques.offload:po',
        summary='interleaved with microbatches at equal distances: what PipeOffload moves out of',
        bubble=SLOTTED_BUBBLE,
        memory=Formula('at most ((p+1)(v+1)/2 + v)/v'),
        source='PipeOffload, arXiv 2503.01328',
        when=(
            'with offload: half of the chunks on the host leave about (v+2)/(8v) of p '
            'activations, all of them four chunks. By itself `gis-h` holds less for less bubble.'
        ),
        aliases=('PO-base', 'PipeOffload-base'),
        options=('num_chunks', 'costs'),
    ),
)
