"""Prints what papers measured on A100s beside what our simulator predicts.

As Markdown: the tables of docs/benchmarks/paper.md, without an option those of Zero Bubble (from
its own pass times), with --offload those of PipeOffload (from its own times of copies); with
--advise the tables of docs/advise.md (published runs, from the models' shapes).

    python scripts/compare_with_paper.py [--offload | --advise]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.paper import advised, offload, page

if __name__ == '__main__':
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--offload', action='store_true', help="PipeOffload's table, instead")
    parser.add_argument('--advise', action='store_true', help='from shapes, instead')
    args = parser.parse_args()
    print((advised if args.advise else offload if args.offload else page).page(), end='')
