"""`plan` and `frontier`: all searches of `zbpp plan`, with values in place of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from megatron_zbpp.ir import Schedule, strict_json
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.partitioning.layers import Layers
from megatron_zbpp.partitioning.space import LayerCosts
from megatron_zbpp.planner import plans
from megatron_zbpp.planner.cases import IN_FILE, CaseRequest, Undecided
from megatron_zbpp.planner.cost_sources import CostSource, Overlap, StageCosts, Times
from megatron_zbpp.planner.limits import Candidate, Graphs, Limit
from megatron_zbpp.planner.plan_requests import PLACEMENTS, PlanAnswer, PlanRequest
from megatron_zbpp.planner.plans import Plan
from megatron_zbpp.planner.shard_plans import ShardSearch
from megatron_zbpp.techniques import NAMES
from megatron_zbpp.techniques.composition import OUTPUT, SHARED_LAYERS
from megatron_zbpp.techniques.slices.graph import AUTO, LEAST, Slices, slices_of

_OF_CANDIDATES = ('spent', 'starts', 'graph')
_COMMON = ('memory_limit', 'objective', 'seconds', 'seed')  # of ranks and of candidates
AnyCosts = Sequence[float] | Costs | Layers | str | PathLike[str]


def plan(
    candidates: int | Sequence[Candidate],
    num_microbatches: int,
    *,
    costs: AnyCosts = (1.0, 1.0, 1.0),
    num_chunks: int | Sequence[int] | None = None,
    placements: Sequence[str] = tuple(PLACEMENTS),
    num_layers: int | None = None,
    comm: float | None = None,
    together: float | Mapping[str, float] | None = None,
    slices: Slices | str | None = None,
    seq_length: int | None = None,
    attention: float | Mapping[int, float] = 0.0,
    least_slice: int = LEAST,
    vocab_parallel: float | str | None = None,
    vocab_layers: str = OUTPUT,
    actions: Sequence[str] = (),
    copy_ratio: float | None = None,
    memory_limit: Limit = None,
    objective: str = 'makespan',
    seconds: float = 20.0,
    seed: int = 0,
    cache: str | PathLike[str] | None = None,
    progress: Callable[[float], None] | None = None,
    spent: float = 0.0,
    starts: Iterable[Schedule] = (),
    graph: Graphs | None = None,
) -> Plan:
    """Return the best schedule that is found, as `zbpp plan` does.

    >>> found = plan(2, 4, num_chunks=1, placements=['loop'], seconds=0.1)
    >>> found.value, found.gap
    (13.0, 0.0)

    With a number of ranks the answer is a `PlanAnswer`: its `facts()` are the fields of `zbpp plan
    --json`. With a list of candidates the search is on these placements at these costs alone; then
    only the arguments from `memory_limit` on may be given, but for `cache`.

    Args:
        candidates: p, the number of pipeline ranks; or pairs of a placement and its stages' costs.
        num_microbatches: m.
        costs: times of F, B and W of one full rank, of which a chunk of v takes a v-th; costs by
            stage in model order, or a file of such; or layers, of which each placement gets its
            even split.
        num_chunks: chunks of a rank that are allowed; default 1, 2 and 4, or as the costs say.
        placements: that are allowed: 'loop', 'v', 'wave'.
        num_layers: of the model: no more stages than that.
        comm: latency of a message, in the unit of the costs; default 0, or as the costs say.
        together: time of a forward and a backward that run as one, over that of both; or of each
            kind of pair, `{'FB': 0.9, 'FF': 0.8, 'FW': 0.95}`; default: they run apart.
        slices: of each sequence: how many, tokens of each, 'balanced:4' for slices that take equal
            times, or 'auto' for as many balanced ones as pay.
        seq_length: tokens of a sequence, where sizes of slices are to be found.
        attention: share of attention in F of a whole sequence, 0 to 1, or F as measured, by tokens.
        least_slice: with `slices='auto'`, tokens of a slice, as a mean of all.
        vocab_parallel: forward of a shard of the output layer over that of a full rank, 'file' if
            the costs have times of S and T; 'auto' or 'auto:SHARE': on all ranks only if it pays.
        vocab_layers: layers on all ranks with `vocab_parallel`: 'output' or 'input+output'.
        actions: techniques that the plan may use under a memory limit: 'offload', 'recompute',
            'evict', 'selective'.
        copy_ratio: time of a copy out and back, over that of F, B and W of what is copied.
        memory_limit: most that a rank may hold, or one limit a rank, in the unit of the costs'
            amounts, which parameters count in, too.
        objective: 'makespan' while all ranks wait for each other between iterations; 'window',
            the longest span of one rank, where they do not.
        seconds: at most, but for the schedule to begin with and the check of the plan.
        seed: another one searches elsewhere.
        cache: folder of earlier plans; None: plan anew and keep nothing.
        progress: called now and then with the share of planning that is done, 0 to 1.
        spent: seconds that are over: the clock ends the search so much earlier.
        starts: schedules of m microbatches to be at least as good as, where they keep the limit.
        graph: of one microbatch, by the number of stages; default: F, B and W of each stage.

    Raises:
        PlanningInterrupted: by Ctrl-C; it has the best plan by then.
        ValueError: no schedule keeps the limit, or arguments contradict each other.
    """
    options = {**locals()}
    del options['candidates'], options['num_microbatches'], options['progress']
    of_candidates = {name: options.pop(name) for name in _OF_CANDIDATES}
    if isinstance(candidates, Sequence):
        common = {name: options.pop(name) for name in _COMMON}
        changed = [name for name, value in options.items() if value != _defaults()[name]]
        _refuse(changed, 'a number of ranks in place of candidates')
        of_candidates |= {**common, 'progress': progress}
        return plans.plan(candidates, num_microbatches, **of_candidates)
    _refuse(
        [name for name, value in of_candidates.items() if value], 'candidates in place of ranks'
    )
    request = _request(candidates, num_microbatches, options)
    if request.case.vocab_parallel is not None:
        return ShardSearch(request).plan(progress)
    return request.plan(progress)


def frontier(
    num_ranks: int,
    num_microbatches: int,
    limits: Sequence[float],
    *,
    progress: Callable[[float], None] | None = None,
    **options: Any,
) -> list[tuple[float, PlanAnswer]]:
    """Return each memory limit with the best plan under it, as `zbpp plan --frontier` does.

    No plan is worse than that of a lower limit.

    Args:
        num_ranks: p.
        num_microbatches: m.
        limits: most that a rank may hold, in the unit of the costs' amounts.
        progress: called now and then with the share that is done, 0 to 1.
        options: further arguments of `plan`, but for `memory_limit`; `seconds` are for all limits.

    Raises:
        FrontierInterrupted: by Ctrl-C; it has the best plans by then.
        ValueError: as `plan`.
    """
    return _request(num_ranks, num_microbatches, options).frontier(limits, progress)


def _defaults() -> dict[str, Any]:
    return plan.__kwdefaults__ or {}


def _refuse(names: Sequence[str], needed: str) -> None:
    if names:
        raise ValueError(f'{", ".join(names)}: give {needed}, or leave them out')


def _request(num_ranks: int, num_microbatches: int, options: Mapping[str, Any]) -> PlanRequest:
    """Return the request of `plan`'s arguments; `options`: those that are named."""
    if unknown := options.keys() - _defaults().keys() | options.keys() & {*_OF_CANDIDATES}:
        raise TypeError(f'unknown arguments: {", ".join(sorted(unknown))}')
    strict_json.require_whole(num_ranks=num_ranks, num_microbatches=num_microbatches)
    sizes = {'num_ranks': num_ranks, 'num_microbatches': num_microbatches}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f'{name} is {size}: give a whole number from 1 up')
    given = {**_defaults(), **options}
    _require_known('placements', given['placements'], PLACEMENTS)
    _require_known('actions', given['actions'], (*NAMES, SELECTIVE))
    _require_known('vocab_layers', [given['vocab_layers']], SHARED_LAYERS)
    share, slices = given['vocab_parallel'], given['slices']
    if share is not None and isinstance(given['memory_limit'], Sequence):
        raise ValueError('vocab_parallel is planned under one memory limit: give a number')
    of_case = {
        'slices': None if slices is None else slices_of(slices),
        'costs': _source(given['costs']),
        'together': _overlap(given['together']),
        'vocab_parallel': _share(share),
    }
    case = CaseRequest.of({**given, **sizes, **of_case, 'num_chunks': None})
    chunks, folder = given['num_chunks'], given['cache']
    given['num_chunks'] = [chunks] if isinstance(chunks, int) else chunks
    given['folder'] = None if folder is None else Path(folder)
    return PlanRequest.of(case, {**given, **sizes})


def _require_known(argument: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f'{argument}: {name!r} is unknown: choose of {", ".join(known)}')


def _source(costs: AnyCosts) -> CostSource:
    if isinstance(costs, Layers):
        return LayerCosts(costs, 'costs')
    if isinstance(costs, Costs):
        return StageCosts.of(costs)
    if isinstance(costs, str | PathLike):
        return StageCosts.read(str(costs))
    forward, backward, weight = costs
    return Times(forward, backward, weight)


def _overlap(together: float | Mapping[str, float] | None) -> Overlap | None:
    if together is None or isinstance(together, int | float):
        return None if together is None else Overlap(float(together), {})
    _require_known('together', together, ('FB', 'FF', 'FW'))
    return Overlap.of(together)


def _share(asked: float | str | None) -> float | str | Undecided | None:
    if not isinstance(asked, str) or asked == IN_FILE:
        return asked
    word, _, share = asked.partition(':')
    if word != AUTO:
        raise ValueError(f"vocab_parallel {asked!r}: give a share, 'file', 'auto' or 'auto:0.2'")
    return Undecided(share if share == IN_FILE else float(share) if share else None)
