#!/usr/bin/env bash
# Runs the tests. Sets itself up.
#   ./scripts/test.sh [PYTEST_ARGUMENT ...]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# hundreds of processes start, and would compile all of Transformer Engine and of ours each
unset PYTHONDONTWRITEBYTECODE
exec "$VENV/bin/python" -m pytest "$@"
