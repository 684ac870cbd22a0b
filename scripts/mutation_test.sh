#!/usr/bin/env bash
# Breaks the pure core in small ways (mutmut makes the breaks), one at a time, and lists those that no
# unit test notices: first the tests of the same room run, then all others. Some 20 seconds a mutant
# that is noticed. Sets itself up.
#   ./scripts/mutation_test.sh [N [SEED]]      N mutants chosen at random; default 60, seed 1
# What it made stays in runs/mutation: there, `mutmut show NAME` shows a mutant.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
number=${1:-60} seed=${2:-1}
python=$PWD/$VENV/bin/python
"$python" -m pip install --quiet --disable-pip-version-check mutmut==3.8.1

copy=runs/mutation
rm -rf "$copy" && mkdir -p "$copy"
git ls-files -z | xargs -0 cp --parents -t "$copy"
cd "$copy"
cat >> pyproject.toml << 'END'

[tool.mutmut]
source_paths = ["megatron_zbpp"]
only_mutate = [
    "megatron_zbpp/ir/*",
    "megatron_zbpp/schedules/*",
    "megatron_zbpp/analysis/*",
    "megatron_zbpp/techniques/*",
    "megatron_zbpp/planner/*",
    "megatron_zbpp/partitioning/*",
    "megatron_zbpp/render/*",
]
use_git_change_detection = false
END
export PYTHONPATH=$PWD # in processes that tests start, too
names=$("$python" -c 'import glob, json, os, random, sys
from mutmut.__main__ import create_mutants, copy_also_copy_files, copy_src_dir
os.makedirs("mutants", exist_ok=True)
copy_src_dir(), copy_also_copy_files(), create_mutants(2)
found = []
for file in glob.glob("mutants/**/*.meta", recursive=True):
    found += json.load(open(file))["exit_code_by_key"]
print(*random.Random(int(sys.argv[2])).sample(sorted(found), int(sys.argv[1])))' "$number" "$seed" | tail -n 1)

passes() { # whether tests pass; with a mutant one may never end
    "$python" -m pytest -q -x -n 2 --timeout 120 -p no:cacheprovider "$@" > output.txt 2>&1
}
all=(tests/unit/{ir,schedules,analysis,techniques,planner,partitioning,render,cli} tests/unit/runtime/test_clocks.py)
declare -A file_of
for name in $names; do
    file=${name%.*} && file=${file//.//}
    [ -d "$file" ] && file=$file/__init__
    file_of[$name]=$file.py
    cp "mutants/$file.py" "$file.py" # it has all its mutants, and is as it was until one is chosen
done
if ! passes "${all[@]}"; then
    tail -n 40 output.txt
    echo 'tests fail without a mutant: mend them first' >&2
    exit 1
fi
killed=0 survivors=()
for name in $names; do
    room=$(cut -d / -f 2 <<< "${file_of[$name]}")
    export MUTANT_UNDER_TEST=$name
    if passes "tests/unit/$room" && passes "${all[@]}"; then
        survivors+=("$name")
    else
        killed=$((killed + 1))
    fi
    echo "$killed killed, ${#survivors[@]} survived: $name"
done
echo 'Survivors:'
printf '%s\n' "${survivors[@]}"
