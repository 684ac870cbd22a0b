"""Random launch lines of NVIDIA's loop, and what the docs promise of each.

A composition is drawn from a seed: a model, sizes, Megatron's features, a schedule with techniques
of ours, an event. `promises` gives the runs that it has to equal, each with the sentence of the
docs that promises it; `tried` trains all of them and compares.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import events
import nvidia
import ranks as rank_pool
import stock
from paths import ROOT
from ranks import RankError, Ranks

from megatron_zbpp.schedules.registry import find

ITERATIONS = 4
SAVED = 2  # iteration whose checkpoint a resume loads
EVENTFUL = 2  # iteration in which gradients overflow, or a rank is killed
LAST_BITS = 1e-5
_PATIENCE = 240  # seconds in which the other ranks of one that is killed have to end

BITS, CLOSE = 'to the bit', 'within rounding'
REFUSED, ENDS = 'refused', 'every rank ends with an error'

_TABLES = json.loads(Path(__file__).with_suffix('.json').read_text())


def _weighted(rows: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    """By name: the weight in the draw, and flags."""
    common = _TABLES['flags']
    return {name: (weight, text.format(**common).split()) for name, (weight, text) in rows.items()}


UNTIED = [_TABLES['flags']['untied']]
MODELS = _weighted(_TABLES['models'])
GROUPS = {name: _weighted(rows) for name, rows in _TABLES['groups'].items()}
# one chunk a rank, loops of chunks as Megatron's own, others; each with its weight
ONE, LOOPS, OTHERS, TWO_WAY, ASYNCHRONOUS = _TABLES['schedules'].values()
SCHEDULES = ONE | LOOPS | OTHERS | TWO_WAY | ASYNCHRONOUS
TECHNIQUES = _weighted(_TABLES['techniques'])  # of docs/limits.md's table of pairs: name there
# techniques by which a run equals `1f1b` with them, and not stock
REFERENCES = 'sliced', 'split_vocabulary', 'split_embedding', 'dropout_seeds'
EVENTS: dict[str, int] = _TABLES['events']


@dataclass(frozen=True)
class Composition:
    seed: int  # which it was drawn from
    size: int  # number of ranks
    words: tuple[str, ...]  # names of what was drawn
    flags: tuple[str, ...]  # of Megatron's
    schedule: str
    techniques: dict[str, list[str]]  # flags by technique
    event: str  # a key of `EVENTS`

    @property
    def ours(self) -> list[str]:
        more = chain.from_iterable(self.techniques.values())
        return ['--pipeline-schedule', self.schedule, *more]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the schedule's own technique with each that is added to it."""
        own = {'po-h': 'offload', 'bpipe': 'evict'}.get(self.schedule)
        return ((own, added) for added in self.techniques if own is not None)

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def __str__(self) -> str:
        return ' '.join([*self.flags, *self.ours]) + f' ({self.size} ranks, event: {self.event})'


def draw(seed: int) -> Composition:
    """Draw a composition; a seed always gives the same one."""
    dice = random.Random(seed)

    def pick(weights: dict[str, Any]) -> str:
        counts = [w if isinstance(w, int) else w[0] for w in weights.values()]
        return dice.choices([*weights], counts)[0]

    schedule = pick(SCHEDULES)
    p = 4 if dice.random() < 0.2 or schedule == 'bpipe' else 2  # of two nothing is evicted
    tp = 2 if p == 2 and schedule not in TWO_WAY and dice.random() < 0.2 else 1
    dp = 2 if p == 2 and tp == 1 and (schedule in TWO_WAY or dice.random() < 0.2) else 1
    if schedule in TWO_WAY:
        p, tp, dp = 2, 1, 2
    if schedule in ASYNCHRONOUS:
        p, tp, dp = 2, 1, 1
    model = pick(MODELS)
    if '--num-experts' in MODELS[model][1]:
        tp = 1  # Megatron wants sequence parallelism with it, whose norms are Transformer Engine's
    chunks = max(find(schedule).default_chunks, 2 if schedule in LOOPS else 1)
    layers = p * chunks * (2 if p * chunks <= 4 and schedule not in ASYNCHRONOUS else 1)
    m = dice.choice([p, 2 * p, 8])
    rows = dice.choice([1, 1, 1, 2])
    words, flags = [schedule, model], [*MODELS[model][1]]
    for name, group in GROUPS.items():
        chosen = pick(group)
        if '--overlap-param-gather' in group[chosen][1] and schedule in ASYNCHRONOUS:
            chosen = 'reduce'  # that is refused
        if chosen == 'distributed' and schedule in ASYNCHRONOUS:
            chosen = 'adam'  # the reference by hand clips whole gradients
        if chosen == 'reduce and gather' and 'sgd' in flags:
            chosen = 'none'  # Megatron shards Adam's state alone
        words += [] if chosen == next(iter(group)) else [f'{name}: {chosen}']
        flags += group[chosen][1]
    if 'uniform' in flags or 'block' in flags:
        flags += ['--recompute-num-layers', '1']
    flags += ['--pipeline-model-parallel-size', str(p), '--num-layers', str(layers)]
    flags += ['--tensor-model-parallel-size', str(tp)] * (tp > 1)
    flags += ['--num-virtual-stages-per-pipeline-rank', str(chunks)] * (schedule in LOOPS)
    flags += ['--micro-batch-size', str(rows), '--global-batch-size', str(m * rows * dp)]
    first = str(p * rows * dp)
    if m > p and schedule not in ASYNCHRONOUS and dice.random() < 0.1:
        words.append('growing batch')
        flags += ['--rampup-batch-size', first, first, str(2 * m * rows * dp)]
    if '--num-experts' in flags and dp > 1 and dice.random() < 0.5:
        flags += ['--expert-model-parallel-size', '2']
    techniques = {}
    for _ in range(dice.choice([0, 1, 1, 2, 2, 3]) if schedule not in ASYNCHRONOUS else 0):
        name = pick(TECHNIQUES)
        own = TECHNIQUES[name][1]
        techniques[name] = [*own, dice.choice(['2', '4', '8'])] if name == 'sliced' else own
    if 'split_embedding' in techniques:
        techniques.pop('split_vocabulary', None)  # it has both layers
    if 'split_vocabulary' in techniques or schedule in ASYNCHRONOUS:
        flags += UNTIED  # others are refused; or clip by the norm of all, which is not by hand
    event = pick(EVENTS)
    if event == 'resume' and {'--use-distributed-optimizer', 'sgd'} & {*flags}:
        event = 'none'  # Megatron cannot load its state into torch's Adam, nor one of SGD
    if (event == 'overflow') != ('--fp16' in flags and event in ('overflow', 'none')):
        event = 'overflow' if '--fp16' in flags and event == 'none' else 'none'
    if event == 'NaN':
        flags += ['--no-check-for-nan-in-loss-and-grad']
    if schedule in ASYNCHRONOUS:
        event = 'none'
    words += [*techniques, *([] if event == 'none' else [event])]
    words += [f'p = {p}, tp = {tp}, dp = {dp}, m = {m}']
    return Composition(seed, p * tp * dp, tuple(words), tuple(flags), schedule, techniques, event)


class Promise(NamedTuple):
    """What a run has to equal, and the sentence that says so."""

    page: str  # of the docs
    quote: str  # of that page; white space does not count
    how: str = BITS  # or `CLOSE`, `REFUSED`, `ENDS`
    tolerance: float = 0.0  # relative, of losses and norms of the first iteration
    reference: tuple[str, ...] = ()  # flags of ours of the other run; none: stock Megatron


PROMISES = {name: Promise(*row) for name, row in _TABLES['promises'].items()}
BY_HAND, KILLED = PROMISES['by hand'], PROMISES['killed']


@functools.cache
def pairs() -> dict[tuple[str, str], str]:
    """The table of pairs of techniques in docs/limits.md: by row and column, what it says."""
    table = (ROOT / 'docs' / 'limits.md').read_text().partition('\n| has, added ')[2]
    lines = f'| has, added {table}'.partition('\n\n')[0].splitlines()
    (_, *columns), _, *rows = (line.strip('| ').split(' | ') for line in lines)
    return {
        (own, added): cell
        for own, *cells in rows
        for added, cell in zip(columns, cells, strict=True)
    }


def promises(composition: Composition) -> list[Promise]:
    """Return each run that a composition has to equal; none: nothing is promised."""
    schedule, techniques = composition.schedule, composition.techniques
    if composition.event == 'killed':
        return [KILLED]
    if schedule in ASYNCHRONOUS:
        return [BY_HAND]
    for own, added in composition.pairs():
        cell = pairs().get((own, added), '')
        if cell.startswith('refused'):
            return [Promise('limits.md', cell, REFUSED)]
    dropout, seeded = composition.has('--hidden-dropout'), 'dropout_seeds' in techniques
    jitter = composition.has('--moe-input-jitter-eps')
    megatrons = schedule in ONE  # one stage a rank, each where Megatron has it
    clipped = composition.flags[composition.flags.index('--clip-grad') + 1] == '0.1'
    if (dropout or jitter) and not (megatrons or seeded):
        return []  # other ranks draw
    core = [name for name in REFERENCES if name in techniques]
    plain = 'interleaved' if schedule in LOOPS else '1f1b'
    shared = chain.from_iterable(techniques[name] for name in core)
    reference = '--pipeline-schedule', plain, *shared
    summed = PROMISES['clipped'] if clipped and not (megatrons or schedule in LOOPS) else None
    if core:
        same = {'sliced': 'same slices', 'dropout_seeds': 'seeds'}.get(core[0], 'same shards')
        found = [(summed or PROMISES[same])._replace(reference=reference)]
        if not (dropout or seeded or jitter) and not (
            composition.has('--bf16') or composition.has('--fp16')
        ):
            # auxiliary losses of experts balance each slice
            balanced = composition.has('--moe-aux-loss-coeff') and 'sliced' in core
            found += [PROMISES['slices']] if 'sliced' in core and not balanced else []
            sharded = {'split_vocabulary', 'split_embedding'} & {*core} and not balanced
            found += [PROMISES['shards']] if sharded else []
        return found
    return [summed or PROMISES['stock' if schedule in ('zb-h1', 'zb-v') else 'every schedule']]


class Refusal(NamedTuple):
    said: str


def attempt(argv: list[str], event: Any) -> Any:
    """Train on a rank as `nvidia.train` does; a launch that is refused gives what it said."""
    errors, printed = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(printed):
            return *nvidia.train(argv, event), logged(printed.getvalue())
    except SystemExit as left:
        if left.code != 2:
            raise
        lines = [line for line in errors.getvalue().splitlines() if ': error: ' in line]
        return Refusal(lines[-1].partition(': error: ')[2] if lines else errors.getvalue())


def end(argv: list[str], event: Any) -> None:
    """Train on a rank; an error ends it, as in a job: so that its neighbours notice."""
    try:
        nvidia.train(argv, event)
    except Exception:
        os._exit(1)


def logged(text: str) -> dict[int, dict[str, float]]:
    """Losses in Megatron's log lines, those of routers among them, by iteration."""
    lines = re.finditer(r'^.* iteration +(\d+)/ .*$', text, re.M)
    return {
        int(line[1]): {
            name: float(value) for name, value in re.findall(r'\| (\w[\w ]*loss): (\S+) ', line[0])
        }
        for line in lines
    }


class Failure(NamedTuple):
    """An error of a run: its last line, and whether it is one that we raise with a reason."""

    said: str
    explained: bool

    @classmethod
    def of(cls, error: RankError) -> Failure:
        """Take the error of the first rank that has one of its own."""
        texts = re.split(r'^rank \d+: ', str(error), flags=re.M)[1:]
        for text in texts:
            found = re.search(r'^[A-Za-z_.]+(?:Error|Exception)\b.*', text, re.M)
            if found:
                files = re.findall(r'^  File "([^"]+)"', text, re.M)
                ours = bool(files) and '/megatron_zbpp/' in files[-1]
                kinds = 'NotImplementedError', 'ValueError', 'RuntimeError'
                return cls(found[0], ours and found[0].startswith(kinds) and ': ' in found[0])
        return cls(' / '.join(text.splitlines()[-1] for text in texts if text.strip()), False)


@dataclass(frozen=True)
class Spoilt:
    """Puts a NaN into the gradient of the last norm in one iteration, wherever that is."""

    iteration: int

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        calls = count(1)

        def spoil(model, *_, **__):
            if next(calls) == self.iteration:
                for name, parameter in chain.from_iterable(c.named_parameters() for c in model):
                    if 'final_layernorm.weight' in name:
                        parameter.main_grad.view(-1)[0] = float('nan')

        with events.before((training, 'finalize_model_grads', spoil)):
            yield


@dataclass(frozen=True)
class Killed:
    """A rank is gone in the middle of an iteration, in a forward."""

    iteration: int
    rank: int

    @contextmanager
    def __call__(self, training: Any) -> Iterator[None]:
        import torch.distributed as dist
        from megatron.core.models.gpt import GPTModel

        iterations = []

        def die(*_, **__):
            if dist.get_rank() == self.rank and len(iterations) == self.iteration:
                os._exit(1)

        counted = training, 'train_step', lambda *_, **__: iterations.append(None)
        with events.before(counted, (GPTModel, 'forward', die)):
            yield


def event_of(composition: Composition) -> Any:
    rank = composition.seed % composition.size
    # behind reductions that have begun, one replica alone would skip its step
    overlapped = composition.has('--overlap-grad-reduce')
    overflow = events.ReducedOverflow if overlapped else events.Overflow
    return {
        'overflow': overflow(EVENTFUL, rank),
        'NaN': Spoilt(EVENTFUL),
        'killed': Killed(EVENTFUL, rank),
    }.get(composition.event, events.nothing)


def run(ranks: Ranks, argv: list[str], event: Any) -> nvidia.Run | Refusal | Failure:
    common = [*nvidia.COMMON, *map(str, argv)]
    try:
        kept = nvidia.is_kept(common, event)
        results = stock.trained(ranks, attempt, common, event, kept=kept, timeout=120)
    except RankError as error:
        return Failure.of(error)
    refused = [each for each in results if isinstance(each, Refusal)]
    if refused:
        if len(refused) < len(results):
            return Failure('some ranks refused, others trained', False)
        return max(refused, key=lambda each: len(each.said))
    left = nvidia.left([result[:-1] for result in results])
    return dataclasses.replace(left, reported=results[-1][-1])


class Outcome(NamedTuple):
    kind: str  # 'kept', 'refused', 'stock fails', 'nothing promised', or a fault
    said: str  # what was compared, or the message

    @property
    def is_fault(self) -> bool:
        return self.kind in ('differs', 'unexplained', 'not refused', 'hangs')


def tried(ranks: Callable[[int], Ranks], composition: Composition) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        return _tried(ranks(composition.size), composition, Path(folder))


def _tried(ranks: Ranks, composition: Composition, folder: Path) -> Outcome:
    flags, event = [*composition.flags, '--train-iters', str(ITERATIONS)], event_of(composition)
    promised = promises(composition)
    if promised == [KILLED]:
        return _killed(ranks, composition, flags, event)
    by_hand = promised == [BY_HAND]
    ours_event = event
    if by_hand:
        from test_asynchronous import WeightsByHand, finished

        event, ours_event = WeightsByHand(composition.schedule), finished
    start = 0
    saving, loading = [], []
    if composition.event == 'resume':
        start = SAVED
        saving = ['--save', str(folder), '--save-interval', str(SAVED)]
        loading = ['--load', str(folder), '--ckpt-step', str(SAVED)]
    stock = run(ranks, [*flags, *saving], event)
    if isinstance(stock, (Refusal, Failure)):
        return Outcome('stock fails', stock.said)
    ours = run(ranks, [*flags, *loading, *composition.ours], ours_event)
    if isinstance(ours, Failure) and not ours.explained:
        return Outcome('unexplained', ours.said)
    if isinstance(ours, (Refusal, Failure)):
        return Outcome('refused', ours.said)
    for promise in promised:
        if promise.how == REFUSED:
            return Outcome('not refused', promise.quote)
        expected = stock
        if promise.reference:
            expected = run(ranks, [*flags, *loading, *promise.reference], event)
            if isinstance(expected, (Refusal, Failure)):
                return Outcome('refused', f'its reference: {expected.said}')
        assert isinstance(expected, nvidia.Run)
        difference = differs(composition, ours, expected, promise, start)
        if difference:
            return Outcome('differs', f'{difference}; promised: {promise.page}: {promise.quote}')
    if not promised:
        return Outcome('nothing promised', 'other random numbers')
    return Outcome('kept', ', '.join(each.how for each in promised))


def _killed(ranks: Ranks, composition: Composition, flags: list[str], event: Any) -> Outcome:
    """A rank that is gone ends all others: with an error each, and soon."""
    with mock.patch.object(rank_pool, '_LAST_WORDS', _PATIENCE):
        try:
            ranks.run(end, [*nvidia.COMMON, *flags, *composition.ours], event, timeout=300)
        except RankError as error:
            if 'no answer' in str(error):
                return Outcome('hangs', str(error)[-300:])
            return Outcome('kept', ENDS)
    return Outcome('refused', 'it never ran')


def differs(
    composition: Composition, ours: nvidia.Run, expected: nvidia.Run, promise: Promise, start: int
) -> str:
    """Return the first difference that a promise does not allow; empty: there is none."""
    losses, norms = nvidia.since(start, expected.losses), nvidia.since(start, expected.grad_norms)
    if ours.losses.keys() != losses.keys():
        return f'iterations {[*ours.losses]}, expected {[*losses]}'
    for at, values in nvidia.since(start, expected.reported).items():
        if start and at == start + 2:
            continue  # Megatron's second line of a run has means of its first two iterations
        tolerance = LAST_BITS if promise.how == BITS else 10 * LAST_BITS  # six digits are printed
        for name, value in values.items():
            own = ours.reported.get(at, {}).get(name, math.nan)
            if not math.isclose(own, value, rel_tol=tolerance) and not math.isnan(value):
                return f'log line {at}, {name}: {own}, expected {value}'
    for index, (at, (loss, *rest)) in enumerate(losses.items()):
        own, *others = ours.losses[at]
        if promise.how == CLOSE:
            # later losses follow from weights: Adam's first steps enlarge rounding
            of_loss = of_norm = promise.tolerance if index == 0 else 1e3 * promise.tolerance
            others, rest = others[-2:], rest[-2:]
        else:
            of_loss, of_norm = 0, 0 if composition.schedule in ONE else LAST_BITS
        if others != rest or not _close(own, loss, of_loss):
            return f'loss {at}: {_read(own)} {others}, expected {_read(loss)} {rest}'
        # by hand, the norm in the log is that of the last stage
        if promise != BY_HAND and not _close(ours.grad_norms[at], norms[at], of_norm):
            return f'norm {at}: {_read(ours.grad_norms[at])}, expected {_read(norms[at])}'
    if promise.how == CLOSE:
        return ''
    if ours.zeros != nvidia.since(start, expected.zeros):
        return f'zeros {ours.zeros}, expected {expected.zeros}'
    if composition.event == 'NaN':
        return ''  # there are several
    if ours.parameters != expected.parameters:
        keys = [
            key for key, value in ours.parameters.items() if value != expected.parameters.get(key)
        ]
        return f'parameters of {keys[:3]}'
    if not composition.has('--use-distributed-optimizer') and ours.optimizer != expected.optimizer:
        return 'optimizer state'
    return ''


def _read(text: str) -> float:
    return float.fromhex(text)


def _close(own: str, expected: str, tolerance: float) -> bool:
    one, other = _read(own), _read(expected)
    if math.isnan(other) or tolerance == 0:
        return own == expected
    return math.isclose(one, other, rel_tol=tolerance)
