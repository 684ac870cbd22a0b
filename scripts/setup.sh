# shellcheck shell=bash
# Sourced by the other scripts: makes .venv in the checkout with the package and its pinned
# development versions, or reuses it. PYTHON chooses the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "$PYTHON is $("$PYTHON" --version 2>&1): megatron_zbpp needs Python 3.10 or later; set PYTHON" >&2
    exit 1
}
# The interpreter and what is to be installed: pyproject.toml up to the settings of tools.
wanted=$("$PYTHON" -c 'import hashlib, sys
print(sys.version, hashlib.sha256(open("pyproject.toml", "rb").read().split(b"\n[tool.")[0]).hexdigest())')
if [ "$(cat "$VENV/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing megatron_zbpp and what it needs into $VENV ..." >&2
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[dev]'
    echo "$wanted" > "$VENV/installed"
fi
