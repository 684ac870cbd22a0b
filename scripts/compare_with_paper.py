"""Prints what the Zero Bubble papers measured on A100s beside what our simulator predicts.

It predicts from their own pass times. As Markdown, this is docs/benchmarks/paper.md.

    python scripts/compare_with_paper.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.paper.page import page

if __name__ == '__main__':
    print(page(), end='')
