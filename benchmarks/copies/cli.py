"""The command line of scripts/benchmark_copies.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.tables import aligned
from benchmarks.copies.measure import Case, Found, measured
from benchmarks.copies.stage import Sizes

_ABOUT = """\
Moves activations without a GPU. Passes sleep; copies are a thread that sleeps for bytes over
bandwidth beside them. Measured times stand beside simulated ones, and what each process really
holds (its resident set) beside what was planned.
"""
_TIMED = [(name, k) for k in (0.5, 1.0, 2.0) for name in ('po+offload', '1f1b+offload')]
_HELD = [('1f1b', 4), ('bpipe', 4), ('1f1b+recompute', 4), ('po', 2), ('po+offload', 2)]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print; the exit status."""
    parser = argparse.ArgumentParser(description=_ABOUT)
    add = parser.add_argument
    add('--ms', type=float, default=20.0, help='of F, B and W each (default: 20)')
    add('--mib', type=int, default=48, help='that a forward saves, for memory (default: 48)')
    add('--rounds', type=int, default=5, help='that count (default: 5)')
    add('--realtime', action='store_true', help='ranks come before other programs; as root')
    add('--json', type=Path, metavar='FILE', help='takes the numbers')
    args = parser.parse_args(argv)
    if args.ms <= 0 or args.mib < 1 or args.rounds < 1:
        parser.error('--ms, --mib and --rounds: give numbers above 0')
    rounds = args.rounds + 1
    timed = [
        Case(name, k, 2, 8, Sizes(args.ms / 1e3, 2**20), rounds, args.realtime)
        for name, k in _TIMED
    ]
    held = [Case(name, 1.0, p, 8, Sizes(1e-3, args.mib * 2**20), 3) for name, p in _HELD]
    times, memory = [(c, measured(c)) for c in timed], [(c, measured(c)) for c in held]
    print(aligned([('schedule', 'k', 'ms', 'simulated', 'ratio'), *map(_time, times)], 1))
    print()
    print(aligned([('schedule', 'rank', 'MiB', 'planned', 'ratio'), *_held(memory)], 1))
    if args.json:
        found = [{'name': c.name, 'k': c.ratio, **f._asdict()} for c, f in (*times, *memory)]
        args.json.write_text(json.dumps(found, indent=1) + '\n')
    return 0


def _time(entry: tuple[Case, Found]) -> tuple[str, ...]:
    case, found = entry
    ratio = found.seconds / found.simulated
    cells = f'{found.seconds * 1e3:.1f}', f'{found.simulated * 1e3:.1f}', f'{ratio:.3f}'
    return case.name, f'{case.ratio:g}', *cells


def _held(entries: Sequence[tuple[Case, Found]]) -> list[tuple[str, ...]]:
    return [
        (
            case.name,
            str(rank),
            f'{held / 2**20:.0f}',
            f'{planned / 2**20:.0f}',
            f'{held / planned:.3f}',
        )
        for case, found in entries
        for rank, (held, planned) in enumerate(zip(found.held, found.planned, strict=True))
    ]
