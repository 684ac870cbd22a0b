#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with one: the tests marked gpu, those of the adapter to
# Transformer Engine if that is installed, and the benchmark of one stage. Keeps what they say under
# docs/results. Sets itself up.
#
#   ./scripts/gpu_check.sh [ARGUMENT_OF_BENCHMARK_GPT ...]
#
#   WHEELS   a folder of wheels, to install without a network (PIP_FIND_LINKS does the same); made by
#            pip download -d FOLDER '.[plot]' setuptools wheel pytest pytest-timeout hypothesis ortools
#   PYTHON   the interpreter (default: python3)
#   VENV     where to install (default: .venv-gpu); it sees the packages of PYTHON, so that a
#            container's torch, Transformer Engine and apex are used
#   RESULTS  where to write (default: docs/results)
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

offline=()
if [ -n "$WHEELS" ]; then
    offline=(--no-index --find-links "$WHEELS")
fi
pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${offline[@]}")
echo "gpu_check.sh: installing into $VENV ..." >&2
"$PYTHON" -m venv --system-site-packages "$VENV"
"${pip[@]}" 'setuptools>=68' wheel
"${pip[@]}" --no-build-isolation -e '.[plot]' pytest pytest-timeout hypothesis ortools
python=$VENV/bin/python
"$python" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null ||
    no_gpu "$device is here, but torch $("$python" -c 'import torch; print(torch.__version__)') cannot use it"

mkdir -p "$RESULTS"
name=$RESULTS/$(date -u +%Y-%m-%d)-$(tr -cs '[:alnum:]\n' - <<< "$device")
status=0

tests=0
"$python" -m pytest -v -m gpu -rs | tee "$name.tests.txt" || tests=$?
adapter='not run: transformer_engine cannot be imported'
if "$python" -c 'import transformer_engine.pytorch' 2> /dev/null; then
    adapter='passed'
    "$python" -m pytest -v tests/unit/test_te_sources.py |
        tee -a "$name.tests.txt" || adapter='FAILED'
fi
benchmark=0
"$python" scripts/benchmark_gpt.py --single-gpu --json "$name.json" --png "$name.png" "$@" |
    tee "$name.table.txt" || benchmark=$?

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
    echo "- tests marked gpu: $([ "$tests" = 0 ] && echo passed || echo "FAILED ($tests)"): $(grep -E '^=+ .* in ' "$name.tests.txt" | head -n 1 | tr -d =)"
    echo "- adapter to Transformer Engine against its stand-ins: $adapter"
    echo "- benchmark of one stage: $([ "$benchmark" = 0 ] && echo 'done' || echo "FAILED ($benchmark)")"
    echo
    echo 'Rows of kind predicted were simulated from the measured stages.'
    echo
    echo '```'
    cat "$name.table.txt"
    echo '```'
} > "$name.md"
rm "$name.table.txt"
echo "gpu_check.sh: wrote $name.md" >&2
if [ "$tests" != 0 ] || [ "$adapter" = FAILED ] || [ "$benchmark" != 0 ]; then
    status=1
fi
exit "$status"
