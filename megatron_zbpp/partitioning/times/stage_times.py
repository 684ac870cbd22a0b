"""Times of stages from the passes that profilers recorded, and what they could not tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from statistics import median
from typing import NamedTuple

from megatron_zbpp.ir import BW, B, F, W
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.times.recording import Recording, TimedPass, find_passes

HALF = 0.5  # of a backward counts as W where nothing tells


class Measured(NamedTuple):
    """Times of stages, in seconds."""

    layout: str  # layers of the stages, as `Ett|ttL`
    costs: Costs  # of the stages; activations are those of `Costs`, as no source tells them
    # a sentence each: what the source could not tell, and what was assumed instead
    notes: tuple[str, ...] = ()
    joined: bool = False  # whether a stage is all that a rank has: chunks were not told apart
    # as `Placement.routes`; empty: the source does not tell
    routes: tuple[tuple[int, ...], ...] = ()


def from_recordings(
    recordings: Sequence[Recording], layout: str, weight_share: float | None = None
) -> Measured:
    """Return the times of stages: medians over all passes of a stage, in all recordings."""
    stages = len(layout.split('|'))
    of_stages: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    placed: list[tuple[Recording, list[TimedPass]]] = []
    for recording, place, ranks in _places(recordings, stages):
        passes = _placed(find_passes(recording), place, ranks, stages)
        if not passes:
            raise ValueError(
                f'{recording.source} has no forward nor backward: profile whole iterations of '
                'training, and let the profiler record CPU activities (of Nsight: -t nvtx,cuda)'
            )
        placed.append((recording, passes))
        for own in passes:
            of_stages[own.kind, own.stage or 0, own.slice].append(own.end - own.start)
    _require_stages(of_stages, recordings, stages)
    times: dict[tuple[str, int], float] = defaultdict(float)
    for (kind, stage, _), took in of_stages.items():
        times[kind, stage] += median(took)
    costs, notes = divided(times, stages, weight_share)
    comm = message_time(placed, stages)
    if comm is None:
        notes.append('messages: not told; --write-devices gives links that take no time')
    costs = Costs(costs.times, comm=comm or 0.0)
    return Measured(layout, costs, (*notes, *_left_out(times)))


def _places(recordings: Sequence[Recording], stages: int) -> list[tuple[Recording, int, int]]:
    if all(own.rank in own.pipeline for own in recordings):
        return [(r, r.pipeline.index(r.rank or 0), len(r.pipeline)) for r in recordings]
    known = [own.rank for own in recordings if own.rank is not None]
    ordered = list(recordings)
    if len(known) == len(recordings) == len(set(known)):
        ordered.sort(key=lambda own: own.rank or 0)
    ranks = min(stages, len(ordered))
    if len(ordered) % ranks:
        ranks = len(ordered)
    return [(own, at * ranks // len(ordered), ranks) for at, own in enumerate(ordered)]


def _placed(passes: Sequence[TimedPass], place: int, ranks: int, stages: int) -> list[TimedPass]:
    """Return passes with their stages: as named, or as the interleaved schedule runs chunks."""
    if passes and passes[0].stage is not None:
        most = max(own.stage or 0 for own in passes)
        if most >= stages:
            raise ValueError(
                f'the layout has {stages} stages, and a pass of stage {most} was recorded: give '
                '--layout as the job has it, a part for each stage in model order'
            )
        return list(passes)
    if stages % ranks:
        raise ValueError(
            f'{stages} stages of the layout do not divide among {ranks} ranks: give the '
            'recordings of all pipeline ranks, and --layout as the job has it'
        )
    chunks, found = stages // ranks, list[TimedPass]()
    for own in passes:
        group, within = divmod(own.number, ranks)
        chunk = group % chunks if own.kind == F else chunks - 1 - group % chunks
        number = group // chunks * ranks + within
        found.append(own._replace(stage=chunk * ranks + place, number=number))
    return found


def _require_stages(
    found: Mapping[tuple[str, int, int], object], recordings: Sequence[Recording], stages: int
) -> None:
    """Raise ValueError unless each stage has forwards and backwards."""
    for kinds, word in (((F,), 'forward'), ((B, BW), 'backward')):
        known = {stage for kind, stage, _ in found if kind in kinds}
        if missing := sorted(set(range(stages)) - known):
            raise ValueError(
                f'{", ".join(own.source for own in recordings[:4])}: no {word} of stage '
                f'{", ".join(map(str, missing[:8]))} of {stages}: give the recordings of all '
                'pipeline ranks, of whole iterations (Megatron: without --profile-ranks)'
            )


def divided(
    times: Mapping[tuple[str, int], float], stages: int, weight_share: float | None
) -> tuple[Costs, list[str]]:
    """Return costs with B and W apart, and notes of how that was done.

    Args:
        times: by kind and stage. BW, or B where no stage has W, is of both.
        stages: how many there are.
        weight_share: see `from_recordings`.

    Raises:
        ValueError: a share is given, and nothing is to be divided.
    """
    apart = any(kind == W and time for (kind, _), time in times.items())
    share = HALF if weight_share is None else weight_share
    found: dict[str, list[float]] = {F: [], B: [], W: []}
    halved = False
    for stage in range(stages):
        forward, b, w, bw = (times.get((kind, stage), 0.0) for kind in (F, B, W, BW))
        if not apart or (bw and not b):  # one backward
            halved, bw = True, b or bw
            b, w = bw * (1 - share), bw * share
        for kind, time in ((F, forward), (B, b), (W, w)):
            found[kind].append(time)
    if weight_share is not None and not halved:
        raise ValueError('--weight-share, but W was measured apart from B: leave it out')
    notes: list[str] = []
    if halved:
        how = 'half of it counts as W' if weight_share is None else f'{share:g} of it counts as W'
        cure = '; --weight-share gives another share' if weight_share is None else ''
        notes.append(f'W: not told apart from B; the backward was measured, and {how}{cure}')
    return Costs({kind: tuple(own) for kind, own in found.items()}), notes


def _left_out(times: Mapping[tuple[str, int], float]) -> list[str]:
    """Return a note of kinds of passes that no layer has."""
    others = sorted({kind for kind, _ in times} - {F, B, W, BW})
    return [f'passes {", ".join(others)}: left out, as they are of no layer'] if others else []


def message_time(
    placed: Sequence[tuple[Recording, Sequence[TimedPass]]], stages: int
) -> float | None:
    """Return seconds from a pass's end to the start of the pass on another rank that takes it.

    The shortest that was seen, forwards and backwards taken together, so that clocks which differ
    do not matter; the median over neighbours. None: no pair of neighbours tells.
    """
    pipelines: dict[tuple[int, ...], list[Sequence[TimedPass]]] = defaultdict(list)
    for recording, passes in placed:
        pipelines[recording.pipeline].append(passes)
    lags: list[float] = []
    for own in pipelines.values():
        at: dict[int, int] = {}
        for rank, passes in enumerate(own):
            for stage in {p.stage or 0 for p in passes}:
                at[stage] = rank if stage not in at else -1  # several replicas: none tells
        for stage in range(stages - 1):
            if -1 not in (a := at.get(stage, -1), b := at.get(stage + 1, -1)) and a != b:
                there = _lag(own[a], stage, own[b], stage + 1, (F,))
                back = _lag(own[b], stage + 1, own[a], stage, (B, BW))
                if there is not None and back is not None:
                    lags.append(fsum((there, back)) / 2)
    return max(0.0, median(lags)) if lags else None


def _lag(
    sender: Sequence[TimedPass],
    of: int,
    receiver: Sequence[TimedPass],
    to: int,
    kinds: Sequence[str],
) -> float | None:
    """Return the shortest time between passes of two stages; None: not as many were recorded."""
    ends = {(p.slice, p.number): p.end for p in sender if p.stage == of and p.kind in kinds}
    starts = {(p.slice, p.number): p.start for p in receiver if p.stage == to and p.kind in kinds}
    if not ends or ends.keys() != starts.keys():
        return None
    return min(starts[key] - ends[key] for key in ends)
