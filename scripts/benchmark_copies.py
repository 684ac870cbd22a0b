"""What it costs to move activations, and what it frees: see --help."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.copies.cli import main

if __name__ == '__main__':
    sys.exit(main())
