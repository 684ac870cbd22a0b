#!/usr/bin/env bash
# Breaks the pure core in small ways (mutmut), and lists the breaks that no unit test notices. Takes
# some minutes to see which test runs which function, then seconds a mutant. Sets itself up.
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
# The unit tests run twice in one process: not what imports a module once, and not what takes long.
# Nothing is late: to note who calls whom takes longer than the tests, and mutmut has limits of its own.
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
also_copy = ["examples", "scripts", "benchmarks", "docs", "patches", "README.md", "mkdocs.yml"]
pytest_add_cli_args_test_selection = [
    "tests/unit/ir",
    "tests/unit/schedules",
    "tests/unit/analysis",
    "tests/unit/techniques",
    "tests/unit/planner",
    "tests/unit/partitioning",
    "tests/unit/render",
    "tests/unit/cli",
    "tests/unit/runtime/test_clocks.py",
]
pytest_add_cli_args = [
    "-p", "no:cacheprovider",
    "-p", "no:timeout", "-o", "addopts=",
    "--deselect", "tests/unit/schedules/test_schedules.py::test_it_is_found_by_its_address",
    "--deselect", "tests/unit/cli/test_refused_values.py::test_refused_values_stay[applied(2, [('sliced', (1, 2, 3))])]",
    "--deselect", "tests/unit/analysis/test_simulator.py::test_786432_passes_in_seconds[128]",
    "--deselect", "tests/unit/planner/test_plans.py::test_known_optima",
    "--deselect", "tests/unit/planner/test_plans.py::test_small_plans_are_proven",
]
use_git_change_detection = false
END
export PYTHONPATH=
names=$("$python" -c 'import glob, json, os, random, sys
from mutmut.__main__ import create_mutants, copy_also_copy_files, copy_src_dir
os.makedirs("mutants", exist_ok=True)
copy_src_dir(), copy_also_copy_files(), create_mutants(2)
found = []
for file in glob.glob("mutants/**/*.meta", recursive=True):
    found += json.load(open(file))["exit_code_by_key"]
print(*random.Random(int(sys.argv[2])).sample(sorted(found), int(sys.argv[1])))' "$number" "$seed" | tail -n 1)
# shellcheck disable=SC2086  # one word a mutant
"$python" -m mutmut run --max-children 2 $names
echo 'Survivors:'
"$python" -m mutmut results
