# Sourced by the files beside it: how a program gets onto all nodes of a SLURM job.
# shellcheck shell=bash
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
PORT=${PORT:-29500}

# torchrun with these arguments on each node, as one job.
launch() {
    local head
    export CUDA_DEVICE_MAX_CONNECTIONS=1 # tensor parallelism wants its messages in order
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
        torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS_PER_NODE" \
        --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$PORT" \
        "$@"
}
