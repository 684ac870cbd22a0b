"""What is to run: which runners, in which order their passes go, and what that takes simulated."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from benchmarks.pipelines.emulated import Times
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement, Schedule
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.graph import chain
from megatron_zbpp.planner.cache import default_folder, planned
from megatron_zbpp.schedules import build, find, names
from megatron_zbpp.techniques.composition import TRAINED_BY, require_family_trained
from megatron_zbpp.techniques.updates.versions import steady_state, updates_of, updating

MEGATRON, TORCH, ZBPP = LIBRARIES = ('megatron', 'torch', 'zbpp')
AUTO = 'auto'
EARLY = '+post-validation'  # behind a name of ours: steps do not wait for all ranks
WAITING = '+global-norm'  # behind an asynchronous one: steps do
_MEGATRON = ('1f1b', 'interleaved')
_TORCH = ('1F1B', 'Interleaved1F1B', 'InterleavedZeroBubble', 'ZBVZeroBubble', 'DualPipeV')
_PLANNING = 10.0  # seconds for `auto`


@dataclass(frozen=True)
class Entry:
    """One runner of the comparison.

    Attributes:
        runner: the library that runs it.
        name: of the schedule, there; ours may end in `EARLY` or `WAITING`.
        schedule: the same as a value: what is simulated.
        simulated: seconds of an iteration; messages take no time. Where steps do not wait: of the
            longest window of a rank; of an asynchronous schedule: of a call in the middle.
        peak: most activations that a rank holds, of one microbatch on a full rank.
    """

    runner: str
    name: str
    schedule: Schedule
    simulated: float
    peak: float

    @property
    def title(self) -> str:
        return f'{self.runner}:{self.name}'

    @property
    def early(self) -> bool:
        """Whether optimizer steps do not wait for all ranks."""
        return self.name.endswith(EARLY)

    @property
    def waits(self) -> bool:
        """Whether steps of an asynchronous schedule wait for the norm of all ranks."""
        return self.name.endswith(WAITING)

    @property
    def passes(self) -> int:
        """Most passes of a rank in an iteration."""
        updates = updates_of(self.schedule.graph)
        if updates is None:
            return max(map(len, self.schedule.passes))
        return 2 * updates.every


def plain(name: str) -> str:
    """Return the name of a schedule, without what is said of its steps."""
    return name.removesuffix(EARLY).removesuffix(WAITING)


def is_asynchronous(runner: str, name: str) -> bool:
    """Return whether the schedule steps as it goes: it runs with steps alone."""
    return runner == ZBPP and plain(name) != AUTO and find(plain(name)).asynchronous


def known() -> dict[str, tuple[str, ...]]:
    """Return names of all schedules by the library that runs them."""
    return {MEGATRON: _MEGATRON, TORCH: _TORCH, ZBPP: (*names(), AUTO)}


def selected(texts: Iterable[str] | None) -> list[tuple[str, str]]:
    """(library, name) of what is asked for, Megatron's 1F1B, the reference, first.

    Args:
        texts: `library`, `library:name`, or a name of ours; None for everything.

    Raises:
        ValueError: one of them is not known; the message lists what is.
    """
    chosen = [(MEGATRON, _MEGATRON[0])]
    for text in LIBRARIES if texts is None else texts:
        chosen += _named(text.strip())
    return list(dict.fromkeys(chosen))


def _named(text: str) -> list[tuple[str, str]]:
    """Return what one word of `--schedules` means."""
    if text in LIBRARIES:
        return [(text, name) for name in known()[text]]
    library, _, name = text.rpartition(':')
    library = library or ZBPP
    if library not in LIBRARIES:
        raise ValueError(f'{text!r}: no library {library!r}: known are {", ".join(LIBRARIES)}')
    base = plain(name) if library == ZBPP else name
    suffix = name.removeprefix(base)
    if suffix == WAITING and not is_asynchronous(library, name.lower()):
        raise ValueError(
            f'{name}: steps of {base} are not asynchronous, and wait anyhow: leave {WAITING} out'
        )
    if library == ZBPP and base.lower() != AUTO:
        family = find(base).name
        return [(ZBPP, TRAINED_BY.get(family, family) + suffix)]
    by_key = {other.lower(): other for other in known()[library]}
    if base.lower() in by_key:
        return [(library, by_key[base.lower()] + suffix)]
    near = difflib.get_close_matches(name.lower(), by_key, n=1, cutoff=0.3)
    hint = f' (did you mean {library}:{by_key[near[0]]}?)' if near else ''
    raise ValueError(
        f'unknown schedule {text!r}{hint}: {library} has {", ".join(known()[library])}'
    )


def entry(
    runner: str,
    name: str,
    num_ranks: int,
    num_microbatches: int,
    times: Times,
    progress: Callable[[float], None] | None = None,
) -> Entry:
    """Return the entry for that p, m and these times.

    Args:
        runner, name: as `selected` returns them.
        num_ranks, num_microbatches: p and m.
        times: of a full rank.
        progress: called with the share of planning that is done, for `auto`.

    Raises:
        ValueError: the schedule cannot be had for p and m.
    """
    if runner == ZBPP and name != AUTO and find(plain(name)).num_routes > 1:
        _require_pairs(name, num_ranks, num_microbatches)
    if is_asynchronous(runner, name):
        require_family_trained(find(plain(name)))
    schedule = _schedule(runner, plain(name), num_ranks, num_microbatches, times, progress)
    costs = _costs(schedule.placement, times)
    timeline = simulate(_waiting(schedule) if name.endswith(WAITING) else schedule, costs)
    steady = steady_state(timeline)
    simulated = max(timeline.windows) if name.endswith(EARLY) else timeline.makespan
    simulated = simulated if steady is None else steady.period
    return Entry(runner, name, schedule, simulated, max(peak(schedule, costs)))


def _waiting(schedule: Schedule) -> Schedule:
    """Return the asynchronous schedule with steps that need the gradients of all stages."""
    updates = updates_of(schedule.graph)
    assert updates is not None, 'as it is asynchronous'
    graph = updating(chain(schedule.num_stages), *updates._replace(everywhere=True))
    return replace(schedule, graph=graph)


def _require_pairs(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Return if there are two replicas, each a pipeline, of as many microbatches."""
    if num_microbatches % 2 or num_ranks < 4 or name.endswith(EARLY):
        raise ValueError(
            f'{name} runs on two replicas of half the ranks, whose steps wait for each other: give '
            f'at least 4 ranks, not {num_ranks}, an even number of microbatches, not '
            f'{num_microbatches}, and leave {EARLY} out'
        )


def _schedule(
    runner: str,
    name: str,
    p: int,
    m: int,
    times: Times,
    progress: Callable[[float], None] | None,
) -> Schedule:
    if runner == TORCH:
        from benchmarks.pipelines import torch_runner  # takes a while to import

        return torch_runner.order(name, p, m)
    if runner == MEGATRON and name == 'interleaved' and m % p:
        raise ValueError(
            f"Megatron's interleaved takes multiples of {p} microbatches, not {m}: "
            'change --microbatches, or leave it out'
        )
    return _plan(p, m, times, progress) if name == AUTO else build(name, p, m)


def _plan(p: int, m: int, times: Times, progress: Callable[[float], None] | None) -> Schedule:
    """Return the planner's, in the memory of 1F1B, on one or two stages a rank."""
    placements = (Placement.v(p), Placement.loop(p, 2), Placement.loop(p))
    found, _ = planned(
        default_folder(),
        [(placement, _costs(placement, times)) for placement in placements],
        m,
        memory_limit=float(min(p, m)),
        seconds=_PLANNING,
        objective='makespan',
        seed=0,
        progress=progress,
    )
    return found.schedule


def _costs(placement: Placement, times: Times) -> Costs:
    return Costs.uniform(placement, times.forward, times.backward, times.weight)
