#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with one: first the tests marked gpu, then those marked te
# with the Transformer Engine that is installed, then the benchmark of one stage. Keeps what they say
# under docs/results, to be committed. Sets itself up.
#
#   ./scripts/gpu_check.sh [ARGUMENT_OF_BENCHMARK_GPT ...]
#
#   WHEELS   a folder of wheels, to install without a network (PIP_FIND_LINKS does the same); made by
#            pip download -d FOLDER '.[megatron,plot,exact]' setuptools wheel pytest pytest-timeout hypothesis
#   PYTHON   the interpreter (default: python3)
#   VENV     where to install (default: .venv-gpu); it sees the packages of PYTHON, so that a
#            container's torch, Transformer Engine and apex are used
#   RESULTS  where to write (default: docs/results)
#   TESTS    further arguments of pytest, such as --full for whole grids
set -euo pipefail

no_gpu() {
    echo "gpu_check.sh: no NVIDIA GPU here ($1): nothing was run, nothing was written" >&2
    exit 3
}
command -v nvidia-smi > /dev/null || no_gpu 'there is no nvidia-smi'
device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1) || true
[ -n "$device" ] || no_gpu 'nvidia-smi lists none'

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-gpu}
RESULTS=${RESULTS:-docs/results}
WHEELS=${WHEELS:-${PIP_FIND_LINKS:-}}
TESTS=${TESTS:-}

offline=()
if [ -n "$WHEELS" ]; then
    offline=(--no-index --find-links "$WHEELS")
fi
pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${offline[@]}")
echo "gpu_check.sh: installing into $VENV ..." >&2
"$PYTHON" -m venv --system-site-packages "$VENV"
"${pip[@]}" 'setuptools>=77' wheel
"${pip[@]}" --no-build-isolation -e '.[megatron,plot,exact]' pytest pytest-timeout hypothesis
python=$VENV/bin/python
"$python" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null ||
    no_gpu "$device is here, but torch $("$python" -c 'import torch; print(torch.__version__)') cannot use it"

mkdir -p "$RESULTS"
name=$RESULTS/$(date -u +%Y-%m-%d)-$(tr -cs '[:alnum:]\n' - <<< "$device")
status=0

# The emulations of CUDA, NCCL and Transformer Engine's kernels stay out where there is a GPU.
run_tests() { # NAME PYTEST_ARGUMENT ...: what came of it is in results[NAME]
    local ended=0
    echo "== $1: pytest ${*:2} $TESTS" | tee -a "$name.tests.txt"
    # shellcheck disable=SC2086  # TESTS holds several
    "$python" -m pytest -v -rs "${@:2}" $TESTS | tee -a "$name.tests.txt" || ended=$?
    results[$1]=$(tail -n 1 "$name.tests.txt" | tr -d =)
    [ "$ended" = 0 ] || { results[$1]="FAILED ($ended):${results[$1]}" && status=1; }
}
declare -A results=()
rm -f "$name.tests.txt"
run_tests 'tests on a GPU' -m gpu
if "$python" -c 'import transformer_engine.pytorch' 2> /dev/null; then
    run_tests 'tests of the installed Transformer Engine' -m 'te and not gpu'
    run_tests "Transformer Engine's sources" tests/unit/emulation/test_te_sources.py
else
    results['tests of the installed Transformer Engine']='not run: it cannot be imported'
fi
benchmark='done'
"$python" scripts/benchmark_gpt.py --single-gpu --json "$name.json" --png "$name.png" "$@" |
    tee "$name.table.txt" || { benchmark="FAILED ($?)" && status=1; }

{
    echo "# $device, $(date -u +%Y-%m-%d)"
    echo
    echo '```'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" -c 'import sys, torch; print("Python", sys.version.split()[0], "CUDA", torch.version.cuda)'
    "$python" -m pip list --disable-pip-version-check 2> /dev/null |
        grep -iE '^(torch|triton|megatron|transformer.engine|apex|nvidia-nccl|flash.attn)' || true
    git log -1 --format='commit %H' 2> /dev/null || true
    echo '```'
    echo
    for what in "${!results[@]}"; do
        echo "- $what: ${results[$what]}"
    done | sort
    echo "- benchmark of one stage: $benchmark"
    echo
    echo 'Rows of kind predicted were simulated from the measured stages.'
    echo
    echo '```'
    cat "$name.table.txt"
    echo '```'
} > "$name.md"
rm "$name.table.txt"
echo "gpu_check.sh: wrote $name.md and what it names; commit them: git add $RESULTS" >&2
exit "$status"
