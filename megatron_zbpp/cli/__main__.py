"""Runs `zbpp` where only the interpreter is at hand: python -m megatron_zbpp.cli."""

import sys

from megatron_zbpp.cli import main

sys.exit(main())
