#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with one, in stages that end by themselves. Keeps what
# they say under docs/results, to be committed. Sets itself up. What each stage proves:
# docs/results/README.md.
#
#   ./scripts/gpu_check.sh [ARGUMENT_OF_BENCHMARK_GPT ...]
#
#   STAGES   which, in this order (default: all)
#              tests    those marked gpu, then those marked te with the Transformer Engine installed
#              streams  a reduction on DistributedDataParallel's stream waits for W
#              nccl     2 and 4 ranks of NCCL on this one GPU: bits, hangs, memory
#              micro    what spinning receives cost, how long a send waits; copies; early steps
#              slices   attention of slices of a sequence by each kernel; a layer by tokens
#              shards   S and T of a shard of the output layer; collectives among ranks of NCCL
#              stage    the benchmark of one stage; takes the arguments
#   LIMIT    seconds after which a stage is ended (default: 600)
#   NO_VENV  1: no virtual environment, for a PYTHON that is in one with torch: what it lacks goes
#            into the folder VENV, without dependencies and without torch
#   WHEELS   a folder of wheels, to install without a network (PIP_FIND_LINKS does the same); made by
#            pip download -d FOLDER '.[megatron,plot,exact]' setuptools wheel pytest pytest-timeout hypothesis
#            or, with NO_VENV=1, of some 6 MB, by
#            pip download -d FOLDER --no-deps megatron-core docstring-parser pytest pytest-timeout hypothesis tqdm
#   PYTHON   the interpreter (default: python3)
#   VENV     where to install (default: .venv-gpu); it sees the packages of PYTHON, so that a
#            container's torch, Transformer Engine and apex are used
#   RESULTS  where to write (default: docs/results)
#   TESTS    further arguments of pytest, such as --full for whole grids
#   REHEARSE 1: run without a GPU, on the CPU and gloo, to see that the stages run. That proves
#            nothing of a GPU, and says so; RESULTS must be named, and tests are only collected
set -euo pipefail

no_gpu() {
    echo "gpu_check.sh: no NVIDIA GPU here ($1): nothing was run, nothing was written" >&2
    exit 3
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-gpu}
NO_VENV=${NO_VENV:-}
REHEARSE=${REHEARSE:-}
LIMIT=${LIMIT:-600}
STAGES=${STAGES:-tests streams nccl micro slices shards stage}
WHEELS=${WHEELS:-${PIP_FIND_LINKS:-}}
TESTS=${TESTS:-}

for stage in $STAGES; do
    case $stage in
    tests | streams | nccl | micro | slices | shards | stage) ;;
    *) echo "gpu_check.sh: STAGES has $stage: give some of tests streams nccl micro slices shards stage" >&2 && exit 2 ;;
    esac
done
if [ "$REHEARSE" = 1 ]; then
    [ -n "${RESULTS:-}" ] || { echo 'gpu_check.sh: REHEARSE=1 measures nothing: name a folder in RESULTS' >&2 && exit 2; }
    device='rehearsal without a GPU'
else
    RESULTS=${RESULTS:-docs/results}
    command -v nvidia-smi > /dev/null || no_gpu 'there is no nvidia-smi'
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1) || true
    [ -n "$device" ] || no_gpu 'nvidia-smi lists none'
fi

offline=()
if [ -n "$WHEELS" ]; then
    offline=(--no-index --find-links "$WHEELS")
fi
install() { # INTERPRETER ARGUMENT ...
    "$1" -m pip install --quiet --disable-pip-version-check "${offline[@]}" "${@:2}"
}
echo "gpu_check.sh: installing into $VENV ..." >&2
if [ "$NO_VENV" = 1 ]; then
    python=$PYTHON
    mkdir -p "$VENV"
    folder=$(cd "$VENV" && pwd)
    export PYTHONPATH="$ROOT:$folder${PYTHONPATH:+:$PYTHONPATH}"
    for package in megatron-core:megatron.core docstring-parser:docstring_parser pytest:pytest \
        pytest-timeout:pytest_timeout hypothesis:hypothesis tqdm:tqdm; do
        "$python" -c "import importlib.util as u; assert u.find_spec('${package#*:}')" 2> /dev/null ||
            install "$python" --no-deps --target "$VENV" "${package%:*}"
    done
else
    python=$VENV/bin/python
    "$PYTHON" -m venv --system-site-packages "$VENV"
    install "$python" 'setuptools>=77' wheel
    install "$python" --no-build-isolation -e '.[megatron,plot,exact]' pytest pytest-timeout hypothesis
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi
[ "$REHEARSE" = 1 ] || "$python" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null ||
    no_gpu "$device is here, but torch $("$python" -c 'import torch; print(torch.__version__)') cannot use it"

mkdir -p "$RESULTS"
first=$RESULTS/$(date -u +%Y-%m-%d)-$(tr -cs '[:alnum:]\n' - <<< "$device")
name=$first run=1
while [ "$REHEARSE" != 1 ] && [ -e "$name.md" ]; do # results of an earlier run stay
    run=$((run + 1)) name=$first-$run
done
status=0
declare -A results=()

run() { # NAME FILE COMMAND ...: what it says goes to FILE, what came of it into results[NAME]
    local ended=0
    echo "== $1: ${*:3}" | tee -a "$2"
    timeout --kill-after=10 "$LIMIT" "${@:3}" | tee -a "$2" || ended=$?
    results[$1]='done'
    [ "$ended" = 0 ] && return
    results[$1]="FAILED ($ended)" && status=1
    [ "$ended" != 124 ] || results[$1]="FAILED: not done after $LIMIT s"
}

# Files with tests that are for a GPU or for Transformer Engine: others may import what is not here.
mapfile -t files < <(grep -rlE 'gpu import|mark\.(gpu|te)\b|te_ranks' tests/{dist,megatron} --include='test_*.py' | sort)

# The emulations of CUDA, NCCL and Transformer Engine's kernels stay out where there is a GPU.
run_tests() { # NAME PYTEST_ARGUMENT ...
    local collect=()
    [ "$REHEARSE" != 1 ] || collect=(--collect-only -q)
    # shellcheck disable=SC2086  # TESTS holds several
    run "$1" "$name.tests.txt" "$python" -m pytest -v -rs "${@:2}" "${collect[@]}" $TESTS
    results[$1]="${results[$1]/#done/}: $(tail -n 1 "$name.tests.txt" | tr -d =)"
    results[$1]=${results[$1]#: }
}

stage_tests() {
    rm -f "$name.tests.txt"
    run_tests 'tests on a GPU' -m gpu "${files[@]}"
    if "$python" -c 'import transformer_engine.pytorch' 2> /dev/null; then
        run 'Transformer Engine by itself' "$name.tests.txt" "$python" -c 'if 1:
            import torch, transformer_engine.pytorch as te
            m, x = te.LayerNormLinear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
            m(x).square().mean().backward()
            assert m.weight.grad.isfinite().all() and m.weight.grad.any()'
        run_tests 'tests of the installed Transformer Engine' -m 'te and not gpu' "${files[@]}"
        run_tests "Transformer Engine's sources" tests/unit/emulation/test_te_sources.py
    else
        results['tests of the installed Transformer Engine']='not run: it cannot be imported'
    fi
}

stage_streams() {
    run 'a reduction on a side stream waits for W' "$name.streams.txt" \
        "$python" -m benchmarks.one_gpu.ddp_race
}

stage_nccl() {
    local sizes=()
    [ "$REHEARSE" != 1 ] || sizes=(--cases p2 --only zb-v --iterations 2 --seconds 300)
    run 'ranks of NCCL that share the GPU' "$name.nccl.txt" \
        "$python" -m benchmarks.one_gpu.nccl --logs "$name.nccl.logs" "${sizes[@]}"
}

stage_micro() {
    local parameters=1000 copied=1024
    [ "$REHEARSE" != 1 ] || parameters=1 copied=1
    run 'spinning receives and waiting sends' "$name.micro.txt" \
        "$python" -m benchmarks.one_gpu.spinning
    run 'copies both ways' "$name.micro.txt" \
        "$python" -m benchmarks.one_gpu.copies --mib "$copied"
    run 'a step that is validated later' "$name.micro.txt" \
        "$python" scripts/benchmark_step.py --parameters "$parameters"
}

stage_slices() {
    local sizes=() kernel
    [ "$REHEARSE" != 1 ] || sizes=(--tokens 32 --hidden 128)
    for kernel in torch flash cuDNN unfused; do
        run "slices of a sequence, $kernel" "$name.slices.txt" \
            "$python" -m benchmarks.one_gpu.slices --attention "$kernel" "${sizes[@]}"
    done
}

stage_shards() {
    local sizes=()
    [ "$REHEARSE" != 1 ] || sizes=(--ranks 2 --words 512 --hidden 32 --tokens 64)
    run 'shards of the output layer' "$name.shards.txt" \
        "$python" -m benchmarks.one_gpu.shards --logs "$name.shards.logs" "${sizes[@]}"
}

stage_stage() { # more models, and predictions of more ranks, take longer than a stage may
    run 'benchmark of one stage' "$name.table.txt" "$python" scripts/benchmark_gpt.py --single-gpu \
        --models 1.5b,6.2b --predict-ranks 8,16 --json "$name.json" --png "$name.png" "$@"
}

rm -f "$name".{streams,nccl,micro,slices,shards,table}.txt
for stage in $STAGES; do
    case $stage in
    tests) stage_tests ;;
    streams) stage_streams ;;
    nccl) stage_nccl ;;
    micro) stage_micro ;;
    slices) stage_slices ;;
    shards) stage_shards ;;
    stage) stage_stage "$@" ;;
    esac
done

{
    echo "# $device, $(date -u +%Y-%m-%d)"
    echo
    [ "$REHEARSE" != 1 ] || printf 'Nothing here was run on a GPU: this shows that the stages run.\n\n'
    echo '```'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null || true
    "$python" -c 'import sys, torch; print("Python", sys.version.split()[0], "CUDA", torch.version.cuda)'
    "$python" -m pip list --disable-pip-version-check 2> /dev/null |
        grep -iE '^(torch|triton|megatron|transformer.engine|apex|nvidia-nccl|flash.attn)' || true
    git log -1 --format='commit %H' 2> /dev/null || true
    echo '```'
    echo
    for what in "${!results[@]}"; do
        echo "- $what: ${results[$what]}"
    done | sort
    for file in "$name".{streams,nccl,micro,slices,shards}.txt; do
        [ ! -f "$file" ] || { echo && echo '```' && cat "$file" && echo '```'; }
    done
    if [ -f "$name.table.txt" ]; then
        echo
        echo "Rows of kind predicted, simulated from the measured stages, are in $(basename "$name").json."
        echo
        echo '```'
        { grep -vE '^(kind|predicted) ' "$name.table.txt" || true; } | cat -s
        echo '```'
    fi
} > "$name.md"
rm -f "$name".{streams,nccl,micro,slices,shards,table}.txt
if [ "$REHEARSE" = 1 ]; then
    echo "gpu_check.sh: rehearsed without a GPU, which measures nothing: see $name.md" >&2
else
    echo "gpu_check.sh: wrote $name.md and what it names; commit them: git add $RESULTS" >&2
fi
exit "$status"
