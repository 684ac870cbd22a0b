#!/usr/bin/env bash
# Builds the documentation into runs/site; a broken link is an error. Sets itself up: an environment of
# its own, without torch.
#   ./scripts/docs.sh [serve]      with serve: on http://localhost:8000, rebuilt at each change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
VENV=${DOCS_VENV:-.venv-docs}

wanted=$(sha256sum pyproject.toml)
if [ "$(cat "$VENV/installed" 2> /dev/null)" != "$wanted" ]; then
    echo "installing what builds the documentation into $VENV ..." >&2
    "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[docs]'
    echo "$wanted" > "$VENV/installed"
fi
# mkdocs-material tells of its successor in each build
export NO_MKDOCS_2_WARNING=1
exec "$VENV/bin/python" -m mkdocs "${1:-build}"
