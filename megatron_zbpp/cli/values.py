"""Numbers on the command line: each a number that makes sense, or an error that names the cure."""

from __future__ import annotations

import argparse
import re
from math import isfinite, nan

from megatron_zbpp.planner.cost_sources import Overlap
from megatron_zbpp.planner.limits import Bytes

MOST_RANKS = 4096  # of a pipeline: drawn or simulated within seconds
_MOST = 1e30  # of any number: sums and products of such are numbers, too
_MOST_COUNTED = 10**12  # of microbatches, tokens, words, steps
_MOST_LAYERS = 10_000  # of a model: each has its costs
_WEEK = 7 * 24 * 3600  # in seconds
_BYTES = re.compile(r'([0-9.]+(?:e[0-9]+)?) ?(B|[kKMGT]B|[KMGT]iB)', re.ASCII)


def require(text: str, ok: bool, cure: str) -> None:
    """Raise unless the text makes sense."""
    if not ok:
        raise argparse.ArgumentTypeError(f'{text!r} is not possible: {cure}')


def count(text: str) -> int:
    """Return a whole number from 1 up."""
    require(text, _digits(text) and int(text) > 0, 'give a whole number from 1 up')
    require(text, int(text) <= _MOST_COUNTED, f'give at most {_MOST_COUNTED}')
    return int(text)


def whole(text: str) -> int:
    """Return a whole number from 0 up."""
    require(text, _digits(text), 'give a whole number from 0 up')
    return int(text)


def _digits(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def layers(text: str) -> int:
    """Return a number of layers of a model."""
    require(text, count(text) <= _MOST_LAYERS, f'give at most {_MOST_LAYERS} layers')
    return int(text)


def path(text: str) -> str:
    """Return the path of a file."""
    require(text, bool(text.strip()) and '\0' not in text, 'give the path of a file')
    return text


def ranks(text: str) -> int:
    """Return a number of pipeline ranks."""
    require(text, count(text) <= MOST_RANKS, f'give at most {MOST_RANKS} ranks')
    return int(text)


def counts(text: str) -> list[int]:
    """Return several, divided by commas."""
    return [count(part) for part in text.split(',')]


def amount(text: str) -> float:
    """Return a number from 0 up."""
    try:
        value = float(text) if text.isascii() else nan
    except ValueError:
        value = nan
    require(text, isfinite(value) and value >= 0, 'give a number from 0 up')
    require(text, value <= _MOST, f'give a number up to {_MOST:g}')
    return value


def seconds(text: str) -> float:
    """Return a time that a search may take."""
    require(text, positive(text) <= _WEEK, f'give at most {_WEEK} seconds, a week')
    return float(text)


def positive(text: str) -> float:
    """Return a number above 0."""
    require(text, amount(text) > 0, 'give a number above 0')
    return float(text)


def shares(text: str) -> Overlap:
    """Return the share of all pairs, or that of some kinds: FB=0.9,FF=0.8,FW=0.95."""
    parts = (part.partition('=') for part in text.split(',') if '=' in text)
    given = {name: share for name, _, share in parts}
    known = given.keys() <= {'FB', 'FF', 'FW'}
    require(text, known, 'give one share, or those of kinds of pairs: FB=0.9,FF=0.8,FW=0.95')
    if not given:
        return Overlap(_ratio(text), {})
    pairs = {'FF': 1.0, 'FW': 1.0} | {name: _ratio(share) for name, share in given.items()}
    return Overlap(pairs.pop('FB', 1.0), pairs)


def _ratio(text: str) -> float:
    require(text, 0 < amount(text) <= 2, 'give a share above 0, up to 2; 1 hides nothing')
    return float(text)


def names(text: str) -> list[str]:
    """Return several words, divided by commas."""
    found = text.split(',')
    require(text, all(map(str.strip, found)), 'give names, divided by commas')
    return found


def share(text: str) -> float:
    """Return a number from 0 to 1."""
    try:
        value = float(text) if text.isascii() else -1.0
    except ValueError:
        value = -1.0
    require(text, 0 <= value <= 1, 'give a number from 0 to 1')
    return value


def memory(text: str) -> float:
    """Return a number from 0 up, or so many `Bytes`: 60GiB, 80GB."""
    told = _BYTES.fullmatch(text)
    if told is not None:
        base = 1024 if 'i' in told[2] else 1000
        return Bytes(amount(told[1]) * base ** 'BKMGT'.index(told[2][0].upper()))
    try:
        return amount(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}, or bytes such as 60GiB') from error


def memories(text: str) -> list[float]:
    """Return several, divided by commas."""
    return [memory(part) for part in text.split(',')]


def amounts(text: str) -> list[float]:
    """Return several, divided by commas."""
    return [amount(part) for part in text.split(',')]
