"""Trains random launch lines of NVIDIA's loop beside stock Megatron, and compares them.

python scripts/fuzz_training.py --seed 1 --count 12

A composition is a model, sizes, features of Megatron's, a schedule with techniques of ours and an
event (a resume, an overflow, a NaN, a killed rank), drawn from its seed; seeds go up by one. The
script compares what the docs promise of it: to the bit, within rounding, or refused. It needs
megatron-core from 0.17 on with its training loop, and the checkout's development packages; it runs
on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT / folder) for folder in ('.', 'tests/support', 'tests/megatron', 'examples/gpt')
]


def main(argv: list[str] | None = None) -> int:
    """Train; return 1 if a promise of the docs was broken, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--seed', type=int, default=0, metavar='N', help='first seed (default: 0)')
    parser.add_argument(
        '--count', type=int, default=12, metavar='M', help='number of compositions (default: 12)'
    )
    parser.add_argument(
        '--list', action='store_true', help='print the launch lines and promises, train nothing'
    )
    options = parser.parse_args(argv)
    if options.count < 1:
        parser.error(f'--count {options.count} is wrong because nothing would run: give 1 or more')
    import compositions
    from ranks import Pool, Ranks

    kinds: Counter[str] = Counter()
    faults = []
    pool, begun = Pool(), time.monotonic()
    try:
        for seed in range(options.seed, options.seed + options.count):
            composition = compositions.draw(seed)
            if options.list:
                how = ', '.join(
                    f'{each.how} ({each.page})' for each in compositions.promises(composition)
                )
                print(f'{seed}: {composition}: {how or "nothing promised"}')
                continue
            outcome = compositions.tried(lambda size: Ranks(size, pool), composition)
            kinds[outcome.kind] += 1
            print(
                f'{seed}: {", ".join(composition.words)}: {outcome.kind}: {outcome.said}',
                flush=True,
            )
            if outcome.is_fault:
                faults.append(seed)
                print(f'   {composition}', flush=True)
    finally:
        pool.stop()
    if kinds:
        found = ', '.join(f'{count} {kind}' for kind, count in kinds.most_common())
        print(f'{options.count} compositions in {time.monotonic() - begun:.0f} s: {found}')
    for seed in faults:
        print(f'again: python scripts/fuzz_training.py --seed {seed} --count 1')
    return int(bool(faults))


if __name__ == '__main__':
    sys.exit(main())
