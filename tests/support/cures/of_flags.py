"""Rows of our flags, beside Megatron's own."""

from __future__ import annotations

from cures.asking import HYBRID, LAYERS, SIZES, flags, settings
from cures.row import row

ZB_V = flags('--pipeline-schedule zb-v')
EARLY = '--pipeline-schedule zb-v --enable-optimizer-post-validation'
NODE_OF_4 = {'RANK': '0', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '4', 'WORLD_SIZE': '4'}
LAST_NODE = NODE_OF_4 | {'RANK': '3', 'LOCAL_WORLD_SIZE': '1'}
BIG = (
    '--pipeline-schedule 1f1b --pipeline-model-parallel-size 4 --global-batch-size 8 '
    '--num-layers 800 --hidden-size 65536 --num-attention-heads 64 --seq-length 1048576'
)

FOUND = '--pipeline-schedule zb-v --pipeline-slices auto --seq-length 512'
SHAPE = '--hidden-size 64 --num-attention-heads 4'
SEEDED = '--pipeline-schedule 1f1b --pipeline-dropout-seeds'
LONG = '--pipeline-schedule zb-v --seq-length 16 --pipeline-slices {}'.format

UNTIED = '--untie-embeddings-and-output-weights'
OUTPUT = f'--pipeline-schedule {{}} --pipeline-vocab-parallel output {UNTIED}'.format


FLAGS = {
    'another layer': row(
        flags('--pipeline-schedule zb-v --pipeline-vocab-parallel input'),
        "--pipeline-vocab-parallel is 'input': give 'output'",
        flags(OUTPUT('zb-v')),
    ),
    **{
        f'the output layer on all ranks and {asked}': row(
            flags(f'{OUTPUT(schedule)} --seq-length 16 {asked}'),
            ': it does not train with the output layer on all ranks yet: leave it out, or --pipe',
            flags(OUTPUT('zb-v')),
            flags(f'--pipeline-schedule {schedule} --seq-length 16 {asked}'),
        )
        for schedule, asked in (('zb-v', '--enable-optimizer-post-validation'),)
    },
    'too many slices': row(flags(LONG(17)), 'give at most 16', flags(LONG(16))),
    'slices that do not sum': row(
        flags(LONG('8,4')), 'give sizes that sum to that', flags(LONG('8,4,4')), flags(LONG(2))
    ),
    'no slices': row(flags(LONG('8,x')), 'give how many, such as 4', flags(LONG(4))),
    'slices to be found, of a model of unknown size': row(
        flags(FOUND),
        'give the tokens of each slice',
        flags(f'{FOUND} {SHAPE}'),
        flags(FOUND.replace('auto', '256,256')),
    ),
    'slices to be found, of sequences of unknown length': row(
        flags(f'{SHAPE} {FOUND.partition("--seq")[0]}'),
        'give it, or the tokens of each slice',
        flags(f'{SHAPE} {FOUND}'),
    ),
    'slices of auto': row(
        flags('--pipeline-schedule auto --seq-length 16 --pipeline-slices 2'),
        'name a schedule, or give a plan that zbpp plan --slices has made',
        flags(LONG(2)),
        flags('--pipeline-schedule-file sliced.json --seq-length 16'),
    ),
    'slices of a file': row(
        flags('--pipeline-schedule-file sliced.json --seq-length 16 --pipeline-slices 3'),
        'give tokens of 2, or leave it out',
        flags('--pipeline-schedule-file sliced.json --seq-length 16'),
        flags('--pipeline-schedule-file sliced.json --seq-length 16 --pipeline-slices 12,4'),
    ),
    'no such schedule': row(flags('--pipeline-schedule zb-w'), "did you mean 'zb-v' or ", ZB_V),
    'chunks': row(
        flags('--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 8'),
        'leave --num-virtual-stages-per-pipeline-rank out, or give it 2',
        ZB_V,
        flags('--pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 2'),
    ),
    'chunks by layers': row(
        flags('--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 2'),
        'leave --num-layers-per-virtual-pipeline-stage out',
        ZB_V,
    ),
    'chunks by layout': row(
        flags('--pipeline-schedule zb-h1 --pipeline-model-parallel-layout Et|t|t|tL'),
        'leave --pipeline-model-parallel-layout out, or give it 2 stages',
        flags('--pipeline-schedule zb-h1'),
        flags('--pipeline-schedule zb-h1 --pipeline-model-parallel-layout Ett|ttL'),
    ),
    'chunks by pattern': row(
        flags('--pipeline-schedule zb-h1', HYBRID.format('*|*|*|-')),
        'give --hybrid-layer-pattern 2 segments',
        flags('--pipeline-schedule zb-h1', HYBRID.format('**|*-')),
    ),
    'a limit of none': row(
        flags('--pipeline-schedule zb-h1 --pipeline-schedule-memory-limit 2'),
        '--pipeline-schedule-memory-limit (given 2.0): leave it out, or use one that does: '
        '1f1b-pb, kfkb, zb-1p, zb-2p',
        flags('--pipeline-schedule zb-h1'),
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 2'),
    ),
    'a limit': row(
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 0.5'),
        '0.5 is too small',
        flags('--pipeline-schedule zb-1p --pipeline-schedule-memory-limit 2'),
    ),
    'a time': row(
        flags('--pipeline-schedule zb-v --pipeline-watchdog-timeout -1'),
        '--pipeline-watchdog-timeout is -1.0: give a number from 0 up',
        flags('--pipeline-schedule zb-v --pipeline-watchdog-timeout 0'),
    ),
    'iterations': row(
        flags('--pipeline-schedule auto --pipeline-schedule-profile-iters 0'),
        '--pipeline-schedule-profile-iters is 0: give a whole number from 1 up',
        flags('--pipeline-schedule auto --pipeline-schedule-profile-iters 1'),
    ),
    'kept': row(
        flags(f'{EARLY} --optimizer-post-validation-kept-gib -1'),
        '--optimizer-post-validation-kept-gib is -1.0: give a number from 0 up',
        flags(f'{EARLY} --optimizer-post-validation-kept-gib 0'),
    ),
    'clean steps': row(
        flags(f'{EARLY} --optimizer-post-validation-clean-steps -1'),
        '--optimizer-post-validation-clean-steps is -1: give a whole number from 0 up',
        flags(f'{EARLY} --optimizer-post-validation-clean-steps 0'),
    ),
    'priority': row(
        flags('--pipeline-schedule zb-v --pipeline-message-priority low'),
        "--pipeline-message-priority is 'low': give 'high' or 'group'",
        flags('--pipeline-schedule zb-v --pipeline-message-priority high'),
        flags('--pipeline-schedule zb-v --pipeline-message-priority group'),
    ),
    'the first iteration, both ways': row(
        flags('--pipeline-schedule zb-v --pipeline-prewarm --no-pipeline-prewarm'),
        'give one of them',
        flags('--pipeline-schedule zb-v --pipeline-prewarm'),
        flags('--pipeline-schedule zb-v --no-pipeline-prewarm'),
    ),
    'the first iteration, or not': row(
        settings(prewarm='GPU'),
        'give True, False, or None',
        settings(prewarm=True),
        settings(prewarm=False),
    ),
    'receives': row(
        flags('--pipeline-schedule zb-v --pipeline-message-receives soon'),
        "--pipeline-message-receives is 'soon': give 'early', 'late' or 'latest'",
        *(
            flags(f'--pipeline-schedule zb-v --pipeline-message-receives {when}')
            for when in ('early', 'late', 'latest')
        ),
    ),
    'pictures': row(
        flags('--pipeline-schedule zb-v --pipeline-trace-dir a-file'),
        "--pipeline-trace-dir is 'a-file', which is a file: give the path of a folder",
        flags('--pipeline-schedule zb-v --pipeline-trace-dir a-folder'),
    ),
    'an amount': row(
        flags('--pipeline-schedule zb-v --pipeline-offload some'),
        "--pipeline-offload of 'some': give 'half', 'all', 'auto' or a number of chunks",
        *(
            flags(f'--pipeline-schedule zb-v --pipeline-offload {amount}')
            for amount in ('half', 'all', 'auto', '1')
        ),
    ),
    'too much of it': row(
        flags('--pipeline-schedule zb-v --pipeline-recompute 3'),
        'recompute of 3 chunks: a rank has 2: give a number up to 2',
        flags('--pipeline-schedule zb-v --pipeline-recompute 2'),
    ),
    'it twice': row(
        flags('--pipeline-schedule po-h --pipeline-offload half'),
        'offload: po-h has offload already, and it is placed once: leave it out',
        flags('--pipeline-schedule po-h'),
    ),
    'it, planned': row(
        flags('--pipeline-schedule auto --pipeline-recompute half'),
        '--pipeline-recompute: auto plans orders only: name a schedule',
        flags('--pipeline-schedule zb-v --pipeline-recompute half'),
    ),
    'it without a schedule': row(
        flags('--pipeline-offload half'),
        '--pipeline-offload is about a --pipeline-schedule: give that, too',
        flags('--pipeline-offload half --pipeline-schedule zb-v'),
    ),
    'a trace without a schedule': row(
        flags('--pipeline-trace-dir traces --enable-optimizer-post-validation'),
        'are about a --pipeline-schedule: give that, too',
        flags('--pipeline-trace-dir traces --pipeline-schedule zb-v'),
    ),
    'pictures where nothing can be written': row(
        flags('--pipeline-schedule zb-v --pipeline-trace-dir /proc/nope'),
        "--pipeline-trace-dir is '/proc/nope', but nothing can be written in /proc (",
        flags('--pipeline-schedule zb-v --pipeline-trace-dir pictures/of/a/run'),
    ),
    'freezing, planned': row(
        flags('--pipeline-schedule auto --pipeline-freeze freeze.json'),
        'name that instead of auto',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing by another file': row(
        flags('--pipeline-schedule zb-h1 --pipeline-freeze plan.json'),
        'give what zbpp freeze -o wrote',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing of another schedule': row(
        flags('--pipeline-schedule zb-v --pipeline-freeze freeze.json'),
        'plan it anew (zbpp freeze -o)',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing of slices': row(
        flags(
            '--pipeline-schedule seq1f1b-zb --pipeline-slices 2 --seq-length 16 '
            '--pipeline-freeze freeze-slices.json'
        ),
        'drop --pipeline-freeze, or take a schedule of whole sequences',
        flags('--pipeline-schedule seq1f1b-zb --pipeline-slices 2 --seq-length 16'),
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'freezing without W': row(
        flags('--pipeline-schedule 1f1b --pipeline-freeze freeze-1f1b.json'),
        'take a schedule that has, such as zb-h1',
        flags('--pipeline-schedule zb-h1 --pipeline-freeze freeze.json'),
    ),
    'other forks, two': row(
        flags('--enable-1f1b-v --enable-zbh1-pipeline'),
        'flags that mean 1f1b-v and zb-h1: give --pipeline-schedule instead',
        flags('--pipeline-schedule 1f1b-v'),
    ),
    'other forks, a number': row(
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward most'),
        '--zero-bubble-max-pending-backward most: give a number, or auto',
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward 4'),
        flags('--enable-zero-bubble --zero-bubble-max-pending-backward auto'),
    ),
    'other forks, and ours': row(
        flags('--pipeline-schedule zb-h1 --zero-bubble-v-schedule'),
        '--pipeline-schedule zb-h1 and a flag that means zb-v: give one of them',
        flags('--pipeline-schedule zb-h1'),
        flags('--zero-bubble-v-schedule'),
    ),
    'a name and a file': row(
        flags('--pipeline-schedule zb-v --pipeline-schedule-file plan.json'),
        '--pipeline-schedule zb-v and --pipeline-schedule-file plan.json: give one of them',
        ZB_V,
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a file as a name': row(
        flags('--pipeline-schedule plan.json'),
        'its path to --pipeline-schedule-file',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a file of other microbatches': row(
        flags('--pipeline-schedule-file of-eight.json'),
        'schedule zb-v is for 8 microbatches, not 4: change the parallel or batch sizes, or take a '
        'schedule by its name',
        flags('--pipeline-schedule-file of-eight.json --global-batch-size 8'),
        ZB_V,
    ),
    'a file of other ranks': row(
        flags('--pipeline-schedule-file of-three.json'),
        'is for 3 pipeline ranks, not 2: change the parallel',
        flags(
            '--pipeline-schedule-file of-three.json --pipeline-model-parallel-size 3',
            LAYERS.format(6),
            WORLD_SIZE='3',
        ),
    ),
    'a file of other chunks': row(
        flags('--pipeline-schedule-file zb-v.json --pipeline-model-parallel-layout Ett|ttL'),
        'give as many stages in --pipeline-model-parallel-layout, or leave such flags out',
        flags('--pipeline-schedule-file zb-v.json --pipeline-model-parallel-layout Et|t|t|tL'),
        flags('--pipeline-schedule-file zb-v.json'),
    ),
    'a file with the loss in the middle': row(
        flags('--pipeline-schedule-file inner.json --pipeline-model-parallel-size 3'),
        'inner places the last stage on rank 1: Megatron needs it on the first or last rank (0 or '
        '2)',
        flags('--pipeline-schedule-file outer.json --pipeline-model-parallel-size 3'),
    ),
    'an odd number of replicas': row(
        flags('--pipeline-schedule chimera'),
        'give an even number of them, by twice or half the ranks',
        flags('--pipeline-schedule chimera', WORLD_SIZE='4'),
    ),
    'a plan of other layers': row(
        flags('--pipeline-schedule-file of-five.json'),
        '--num-layers 4, but the layout Ettt|ttL of of-five.json has 5: partition the layers',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan of other letters': row(
        flags('--pipeline-schedule-file letters.json'),
        'with E first and L last',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan and a layout': row(
        flags('--pipeline-schedule-file plan.json --pipeline-model-parallel-layout Ettt|tL'),
        '--pipeline-model-parallel-layout Ettt|tL, but plan.json was planned for Ett|ttL: leave '
        'the flag out',
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan that counts on recomputation': row(
        flags('--pipeline-schedule-file selective.json'),
        'give --recompute-granularity selective, or plan without --actions selective',
        flags('--pipeline-schedule-file selective.json --recompute-granularity selective'),
        flags('--pipeline-schedule-file plan.json'),
    ),
    'a plan of another pattern': row(
        flags('--pipeline-schedule-file plan.json', HYBRID.format('***-')),
        '--hybrid-layer-pattern ***-, but the layout Ett|ttL of plan.json has other layers',
        flags('--pipeline-schedule-file hybrid.json', HYBRID.format('***-')),
    ),
    'arguments of a file': row(
        flags('--pipeline-schedule zb-v --yaml-cfg a.yaml'),
        '--yaml-cfg does not work with --pipeline-schedule: give the arguments as flags',
        ZB_V,
    ),
    'arguments of a checkpoint': row(
        flags('--pipeline-schedule zb-v --use-checkpoint-args'),
        'give the arguments of the checkpoint as flags',
        ZB_V,
    ),
    'no layers': row(
        flags('--pipeline-schedule zb-v', SIZES.partition(' 4 ')[2]),
        '--num-layers is missing: give how many layers the model has',
        ZB_V,
    ),
    'a layout of other letters': row(
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|q|tL'),
        'give the letters E, t, m, L and |',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'a layout that does not divide': row(
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|ttL'),
        'do not divide among 2 pipeline ranks: give each rank as many, divided by |',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'chunks that do not divide': row(
        flags('--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 3'),
        '--num-layers-per-virtual-pipeline-stage 3 does not divide 4 layers among 2 pipeline '
        'ranks: leave it out, or change --num-layers',
        ZB_V,
        flags(
            '--pipeline-schedule zb-v --num-layers-per-virtual-pipeline-stage 3', LAYERS.format(12)
        ),
    ),
    'a first rank that does not divide': row(
        flags('--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1'),
        '--decoder-first-pipeline-num-layers 1 does not divide among 2 chunks: give a multiple, or '
        '--pipeline-model-parallel-layout',
        flags('--pipeline-schedule zb-v --decoder-first-pipeline-num-layers 2'),
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout E|tt|t|tL'),
    ),
    'a last rank and a layout': row(
        flags(
            '--pipeline-schedule zb-v --decoder-last-pipeline-num-layers 2 '
            '--pipeline-model-parallel-layout Et|t|t|tL'
        ),
        'drop --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers',
        flags('--pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL'),
    ),
    'too few layers': row(
        flags('--pipeline-schedule zb-v', LAYERS.format(3)),
        'give each stage a layer (--num-layers), or use fewer pipeline ranks or a schedule with '
        'fewer chunks',
        flags('--pipeline-schedule zb-v', LAYERS.format(4)),
        flags('--pipeline-schedule zb-h1', LAYERS.format(3)),
    ),
    'segments': row(
        flags('--pipeline-schedule zb-interleaved', HYBRID.format('**|*-')),
        '--hybrid-layer-pattern has 2 segments, but the schedule places 4 stages: give that many, '
        'divided by |',
        flags('--pipeline-schedule zb-interleaved', HYBRID.format('*|*|*|-')),
    ),
    'what is refused': row(
        flags('--pipeline-schedule zb-v --tp-comm-overlap'),
        'drop --tp-comm-overlap, or take a schedule without W passes, such as 1f1b or interleaved',
        ZB_V,
        flags('--pipeline-schedule 1f1b --tp-comm-overlap'),
        flags('--pipeline-schedule interleaved --tp-comm-overlap'),
    ),
    'seeds of dropout': row(
        flags(f'{SEEDED} --cuda-graph-impl local'),
        'give --cuda-graph-impl none, or leave out --pipeline-dropout-seeds',
        flags(f'{SEEDED} --cuda-graph-impl none'),
        flags('--pipeline-schedule 1f1b --cuda-graph-impl local'),
    ),
    'memory of the host': row(
        flags(f'--pipeline-offload all {BIG}', **NODE_OF_4),
        'offload fewer chunks, put fewer of the first pipeline ranks on one node',
        flags(BIG, **NODE_OF_4),
        flags(f'--pipeline-offload all {BIG}', **LAST_NODE),
    ),
    'two routes that are not said': row(
        flags('--pipeline-schedule two_ways:two-ways'),
        'say num_routes above it, in @family',
        flags('--pipeline-schedule chimera', WORLD_SIZE='4'),
    ),
    'one of your own that is nowhere': row(
        flags('--pipeline-schedule own_nowhere:made'),
        "there is no module 'own_nowhere': install it on every host, or name its folder in "
        'PYTHONPATH',
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that is not named': row(
        flags('--pipeline-schedule own_nothing:made'),
        "module 'own_nothing' registers none; put @family(...) above the function",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that lacks a package': row(
        flags('--pipeline-schedule own_needs:made'),
        "importing 'own_needs' fails: No module named 'nowhere_at_all'",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that fails': row(
        flags('--pipeline-schedule own_fails:made'),
        "importing 'own_fails' fails: AttributeError",
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own that is no schedule': row(
        flags('--pipeline-schedule own_text:made'),
        'own_text:made made str: return a Schedule from it',
        flags('--pipeline-schedule own_right:made'),
    ),
    'one of your own of another size': row(
        flags('--pipeline-schedule own_more:made'),
        'return one of the 2 and 1 that it was asked for',
        flags('--pipeline-schedule own_right:made'),
    ),
}
