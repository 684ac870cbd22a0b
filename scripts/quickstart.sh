#!/usr/bin/env bash
# Trains a small GPT by Megatron's own 1F1B, by ZB-H1 and by ZB-V, and compares them. Sets itself up.
#   ./scripts/quickstart.sh [--ranks N] [--input FILE_OR_FOLDER ...]      (--help tells more)
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$VENV/bin/python" scripts/quickstart.py "$@"
