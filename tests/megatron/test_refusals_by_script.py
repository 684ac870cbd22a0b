"""What is refused exists in this release, and NVIDIA's script ends in one line about it."""

from __future__ import annotations

import re

import pytest
from nvidia import COMMON, SCRIPT, known, launch, needs_training
from outcome import of_all, refusal
from refused_settings import OF_SOME

from megatron_zbpp.mcore.job.rules import by_flags
from megatron_zbpp.mcore.job.rules_table import REFUSALS, settings

OURS = {f'--pipeline-{name}' for name in ('offload', 'vocab-parallel', 'dropout-seeds')}


@needs_training
def test_each_exists(ranks):
    """In this release; or it is known to be of others."""
    found, _ = ranks(2).run(known)
    cures = by_flags(' '.join(rule.cure for rule in REFUSALS))
    wanted = {*settings(), *re.findall(r'--[a-z0-9-]+', cures)}
    assert '--no-rope-fusion' in wanted
    assert wanted - found <= {*OF_SOME, *OURS}


@needs_training
@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--transformer-impl inference_optimized', 'give --transformer-impl local'),
        ('--fp8-format e4m3', 'drop --fp8-format'),
        ('--use-flash-attn', 'drop --use-flash-attn'),
        ('--attention-backend flash', 'attention_backend=flash: its kernels need a GPU'),
        ('--num-experts 2 --moe-grouped-gemm', 'drop --moe-grouped-gemm'),
        ('--context-parallel-size 2', 'context_parallel_size=2'),
        ('--mtp-num-layers 1', 'give --untie-embeddings-and-output-weights'),
        ('--tp-comm-overlap', 'drop --tp-comm-overlap'),
        ('--cuda-graph-impl local', 'give --cuda-graph-impl none'),
        ('--use-megatron-fsdp', 'use --use-distributed-optimizer'),
        ('--cpu-offloading-num-layers 1', 'drop --cpu-offloading-num-layers'),
        ('--fine-grained-activation-offloading', 'drop --fine-grained-activation-offloading'),
        ('--tensor-parallel-num-weight-shards 2', 'drop --tensor-parallel-num-weight-shards'),
        ('--num-experts 2 --moe-grouped-gemm --moe-single-grouped-weight', 'single-grouped-weight'),
        ('--use-transformer-engine-op-fuser', 'drop --use-transformer-engine-op-fuser'),
        ('--use-torch-fsdp2', 'use --use-distributed-optimizer'),
        ('--overlap-moe-expert-parallel-comm', 'take dualpipe-v, or drop --overlap-moe-expert'),
        ('--pipeline-schedule zb-w', "unknown schedule 'zb-w'"),
        ('--yaml-cfg nowhere.yaml', '--yaml-cfg'),
        ('--use-checkpoint-args', 'give the arguments of the checkpoint as flags'),
    ],
)
def test_refused_by_the_script(ranks, flags, said):
    for flag in {*flags.split()} & {*OF_SOME}:
        if flag not in ranks(2).run(known)[0]:
            pytest.skip(f'{flag} is in Megatron {OF_SOME[flag]}')
    own = '--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule zb-v'
    found = of_all(ranks(2).run(launch, *COMMON, *own.split(), *flags.split()))
    assert said in refusal(found, SCRIPT.name)
