# Sourced by the files beside it: how a program gets onto all nodes of a SLURM job.
#
#   GPUS_PER_NODE  processes of a node, one a GPU. Default: as many GPUs as SLURM was asked for
#   DEVICE=cpu     no GPU is used. sbatch wants --gpus-per-node=0 then, and GPUS_PER_NODE is to be
#                  set: processes of a node, all on its CPU
# shellcheck shell=bash
DEVICE=${DEVICE:-gpu}
asked=${SLURM_GPUS_PER_NODE:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-${asked##*:}} # of h100:8, say
PORT=${PORT:-29500}

if [[ $DEVICE != gpu && $DEVICE != cpu ]]; then
    echo "$SLURM_JOB_NAME: DEVICE=$DEVICE: set it to gpu or cpu" >&2
    exit 2
fi
if ! [[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]]; then
    echo "$SLURM_JOB_NAME: $GPUS_PER_NODE GPUs a node: set GPUS_PER_NODE to the number of" \
        "processes that a node is to have, and DEVICE=cpu if it has no GPU" >&2
    exit 2
fi

# Sets LAUNCHER to the words that start torchrun on each node, as one job. They are the same for each
# job of so many nodes: which are its own is in its environment.
prepare_launcher() {
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # messages in order
    if [ "$DEVICE" = cpu ]; then
        export CUDA_VISIBLE_DEVICES=
    fi
    FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    export FIRST_NODE=${FIRST_NODE%%$'\n'*} # head would end scontrol, and that the job
    # nodes by number: a rendezvous by c10d would ask its store all the time, and one node that is
    # cut off from it would hang in that. SLURM_NODEID is each node's own
    # shellcheck disable=SC2016
    LAUNCHER=(
        srun --ntasks-per-node=1 --kill-on-bad-exit=1
        bash -c 'exec torchrun --node-rank "$SLURM_NODEID" --master-addr "$FIRST_NODE" "$@"'
        torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS_PER_NODE" --master-port "$PORT"
    )
}

# torchrun with these arguments on each node.
launch() {
    prepare_launcher
    exec "${LAUNCHER[@]}" "$@"
}
