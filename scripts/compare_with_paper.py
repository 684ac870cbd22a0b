"""Prints what papers measured on A100s beside what our simulator predicts.

As Markdown: without an option docs/benchmarks/paper.md (Zero Bubble, from its own pass times), with
--offload docs/benchmarks/paper-offload.md (PipeOffload, from its own times of copies).

    python scripts/compare_with_paper.py [--offload]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.paper import offload, page

if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--offload', action='store_true', help="PipeOffload's table, instead")
    print((offload if parser.parse_args().offload else page).page(), end='')
