# Sourced by the files beside it, one a model: trains it with NVIDIA's pretrain_gpt.py under SLURM.
#
# They say MODEL, TENSOR_PARALLEL, PIPELINE_PARALLEL, MICRO_BATCH and GLOBAL_BATCH, and
# EXPERT_PARALLEL where there are experts. What follows is yours to change, here or in the
# environment, as is what launch.sh lists: another number of GPUs a node, or none. Arguments behind
# the sbatch file go to pretrain_gpt.py, after all others.
# shellcheck shell=bash
set -euo pipefail

MEGATRON_LM=${MEGATRON_LM:?"is not set: give the folder of a checkout of Megatron-LM"}
# mock: numbers in place of text, to measure speed
DATA=${DATA:?"is not set: give the prefix of what tools/preprocess_data.py wrote, or mock"}
VOCAB=${VOCAB:-$(dirname "$DATA")/gpt2-vocab.json}
MERGES=${MERGES:-$(dirname "$DATA")/gpt2-merges.txt}
EXPERT_PARALLEL=${EXPERT_PARALLEL:-1}
SCHEDULE=${SCHEDULE-zb-v} # see zbpp list; empty: Megatron's own
CHECKPOINTS=${CHECKPOINTS:-checkpoints/$SLURM_JOB_NAME}
ITERATIONS=${ITERATIONS:-100000}
# shellcheck source=scripts/slurm/launch.sh
. "${SLURM_SUBMIT_DIR:-.}/scripts/slurm/launch.sh"

world=$((SLURM_NNODES * GPUS_PER_NODE))
ranks=$((TENSOR_PARALLEL * PIPELINE_PARALLEL))
if ((world % ranks)); then
    echo "$SLURM_JOB_NAME: $world GPUs do not divide by $ranks (tensor x pipeline parallel):" \
        "give another number of --nodes" >&2
    exit 2
fi
replicas=$((world / ranks))
if ((replicas % EXPERT_PARALLEL)); then
    echo "$SLURM_JOB_NAME: $replicas replicas do not divide by EXPERT_PARALLEL=$EXPERT_PARALLEL:" \
        "set another, or give another number of --nodes" >&2
    exit 2
fi
step=$((replicas * MICRO_BATCH))
if ((GLOBAL_BATCH % step)); then
    echo "$SLURM_JOB_NAME: GLOBAL_BATCH=$GLOBAL_BATCH does not divide by $step (data parallel x" \
        "micro batch): set another GLOBAL_BATCH" >&2
    exit 2
fi

data=(--data-path "$DATA" --split "949,50,1")
tokenizer=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB" --merge-file "$MERGES")
if [ "$DATA" = mock ]; then
    data=(--mock-data)
    tokenizer=(--tokenizer-type NullTokenizer --vocab-size 50256)
fi
parallel=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --overlap-grad-reduce
)
if [ "$DEVICE" = gpu ]; then # without Transformer Engine it cannot load what it saved
    parallel+=(--use-distributed-optimizer)
fi
if ((EXPERT_PARALLEL > 1)); then
    parallel+=(--expert-model-parallel-size "$EXPERT_PARALLEL")
fi
if ((TENSOR_PARALLEL > 1)); then
    parallel+=(--sequence-parallel)
fi
if [ -n "$SCHEDULE" ]; then
    parallel+=(--pipeline-schedule "$SCHEDULE")
fi
training=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --train-iters "$ITERATIONS"
    --bf16
    --lr 1.0e-4
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --init-method-std 0.006
    --attention-dropout 0
    --hidden-dropout 0
)
reports=(
    --save "$CHECKPOINTS"
    --load "$CHECKPOINTS"
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 10
    --log-throughput
)

launcher=(-m megatron_zbpp.launch)
if [ "$DEVICE" = cpu ]; then
    launcher+=(--cpu)
fi

launch "${launcher[@]}" "$MEGATRON_LM/pretrain_gpt.py" \
    "${MODEL[@]}" "${parallel[@]}" "${training[@]}" "${data[@]}" "${tokenizer[@]}" \
    "${reports[@]}" "$@"
