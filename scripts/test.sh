#!/usr/bin/env bash
# Runs the tests. Sets itself up.
#   ./scripts/test.sh [PYTEST_ARGUMENT ...]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" -m pytest "$@"
