"""Rows of launch lines that `zbpp doctor`, `zbpp bench` and `--pair-partners` read."""

from __future__ import annotations

from paths import ROOT

from cures.asking import SIZES, benched, line, nodes
from cures.row import row

NODE = {'RANK': '0', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '2'}
PIPELINE_OF_4 = '--pipeline-model-parallel-size 4'
STOCK = ROOT / 'tests' / 'support' / 'commands.py'  # any script without a word of ours
PATCHED = ROOT / 'examples' / 'gpt' / 'pretrain_gpt.py'

LINES = {
    'a flag misspelt': row(
        line('--pipeline-shedule zb-v'),
        '--pipeline-shedule is not known: did you mean --pipeline-schedule?',
        line('--pipeline-schedule zb-v'),
    ),
    'a script that does not know our flags': row(
        line(f'torchrun {STOCK} --pipeline-schedule zb-v'),
        'does not know --pipeline-schedule: write -m megatron_zbpp.launch before it',
        line(f'torchrun -m megatron_zbpp.launch {STOCK} --pipeline-schedule zb-v'),
        line(f'torchrun {PATCHED} --pipeline-schedule zb-v'),
    ),
    "the launcher's option behind the script": row(
        line(f'torchrun -m megatron_zbpp.launch {STOCK} --cpu --pipeline-schedule zb-v'),
        'is no flag of',
        line(f'torchrun -m megatron_zbpp.launch --cpu {STOCK} --pipeline-schedule zb-v'),
    ),
    'a bench of flags alone': row(
        benched(SIZES),
        'the launch line names no script: give all of it, such as torchrun',
        benched(f'torchrun pretrain_gpt.py {SIZES}'),
    ),
    'no value': row(
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout'),
        'launch line: argument --pipeline-watchdog-timeout: expected one argument',
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout 1'),
    ),
    'no value of the launcher': row(
        line('torchrun --nproc-per-node pretrain_gpt.py --pipeline-schedule zb-v'),
        'launch line: argument --nproc-per-node/--nproc_per_node: expected one argument',
        line('torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-schedule zb-v'),
    ),
    'no number': row(
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout soon'),
        "--pipeline-watchdog-timeout is 'soon': give a number from 0 up",
        line('--pipeline-schedule zb-v --pipeline-watchdog-timeout 1'),
    ),
    'bytes where activations count': row(
        line('--pipeline-schedule auto --pipeline-schedule-memory-limit 60GiB'),
        "memory-limit is '60GiB': give a number from 0 up, in activations of one microbatch",
        line('--pipeline-schedule auto --pipeline-schedule-memory-limit 60'),
    ),
    'no number of processes': row(
        line('torchrun --nproc-per-node gpu pretrain_gpt.py --pipeline-schedule zb-v'),
        '--nproc-per-node gpu is no number: give --gpus',
        line('torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-schedule zb-v'),
        line('--pipeline-schedule zb-v', gpus=2),
    ),
    'GPUs that do not divide': row(
        line('--pipeline-schedule zb-v', gpus=3),
        '3 GPUs do not divide by tensor 1 x context 1 x pipeline 2 parallel: change a size, or '
        '--gpus',
        line('--pipeline-schedule zb-v', gpus=2),
    ),
    'no batch': row(
        line('--pipeline-schedule zb-v', SIZES.replace('--micro-batch-size 1', '')),
        '--micro-batch-size is missing: give how many samples a microbatch has',
        line('--pipeline-schedule zb-v'),
    ),
    'a batch that does not divide': row(
        line('--pipeline-schedule zb-v --micro-batch-size 3', SIZES.replace('-size 1', '-size 3')),
        '--global-batch-size 4 does not divide by 3 (--micro-batch-size 3 x 1 data parallel): give '
        'a multiple',
        line('--pipeline-schedule zb-v', SIZES.replace('-size 1', '-size 2')),
    ),
    'pairs without torchrun': row(
        nodes(PIPELINE_OF_4), '--pair-partners needs RANK', nodes(PIPELINE_OF_4, **NODE)
    ),
    'pairs that another flag parts': row(
        nodes(f'{PIPELINE_OF_4} --use-tp-pp-dp-mapping', **NODE),
        'which --use-tp-pp-dp-mapping puts side by side: give one of them',
        nodes(PIPELINE_OF_4, **NODE),
    ),
    'pairs of other numbers': row(
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '6'}),
        '6 ranks are not a multiple of 4 pipeline ranks',
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '8'}),
        nodes('--pipeline-model-parallel-size 3', **NODE | {'WORLD_SIZE': '6'}),
    ),
    'pairs on odd nodes': row(
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '12', 'LOCAL_WORLD_SIZE': '3'}),
        'give nodes an even number of processes, a multiple of twice the tensor-parallel size',
        nodes(PIPELINE_OF_4, **NODE | {'WORLD_SIZE': '12', 'LOCAL_WORLD_SIZE': '2'}),
    ),
}
