"""Candidates of `zbpp plan`: placements with costs, and named schedules beside them."""

from __future__ import annotations

import contextlib
import itertools
from argparse import Namespace
from collections.abc import Iterator

from megatron_zbpp.cli import slicing
from megatron_zbpp.cli.inputs import (
    PLACEMENTS,
    Case,
    StageCosts,
    chunks_of,
    copied,
    costs_of,
    load_case,
    require_size,
    stages_of,
)
from megatron_zbpp.cli.layer_costs import LayerCosts
from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.ir.costs_file import SELECTIVE
from megatron_zbpp.ir.graph import HOST, PARTNER, TRANSFERS
from megatron_zbpp.schedules import FAMILIES
from megatron_zbpp.techniques import NAMES, find

_COPY = tuple(name for name in NAMES if find(name).moves)


def named_cases(args: Namespace) -> Iterator[tuple[str, Case]]:
    """Yield each named schedule that can be had with chunks that `plan` may use, and its label."""
    for family, chunks in itertools.product(FAMILIES, allowed_chunks(args)):
        if chunks < family.default_chunks == 2 and 'num_chunks' in family.options:
            continue  # of one chunk a rank there are others, as good
        plain = Namespace(**{**vars(args), 'vpp': chunks, 'memory_limit': None})
        with contextlib.suppress(ValueError):  # it is not for such p, m, chunks or times
            yield family.label(chunks), load_case(plain, family.name)


def candidates(args: Namespace) -> list[tuple[Placement, Costs]]:
    """Return the placements that `plan` may use, each once, with the costs of their stages."""
    allowed = allowed_chunks(args)
    placements = {}
    for asked in allowed:
        chunks = chunks_of(args.times, args.pp, asked, asked)
        require_size(args.pp * args.microbatches * (slicing.number(args) or 1) * chunks)
        for name in args.placement:
            if PLACEMENTS[name](chunks):
                placement = (Placement.loop if name == 'loop' else Placement.wave)(args.pp, chunks)
                placements.setdefault(placement, placement)
    if not placements:
        raise ValueError(
            f'--placement {",".join(args.placement)} cannot have {allowed} chunks per rank: '
            'v takes 2, wave takes 2 or more, loop any'
        )
    found = list(placements.values())
    copies = not {*args.actions}.isdisjoint(_COPY)
    if args.copy_ratio is not None and not copies and not args.frontier:
        raise ValueError(
            f'--copy-ratio {args.copy_ratio:g}, but nothing is copied: give --actions '
            f'{" or ".join(_COPY)}'
        )
    if not args.actions:
        return [(placement, _sliced(args, costs_of(args, placement))) for placement in found]
    if args.memory_limit is None and not args.frontier:
        raise ValueError('--actions are for a memory limit: give --memory-limit or --frontier')
    ways = (False, True) if SELECTIVE in args.actions else (False,)
    return [
        (placement, with_selective(args, placement, way)) for way in ways for placement in found
    ]


def _sliced(args: Namespace, costs: Costs) -> Costs:
    slices = slicing.number(args) or 1
    own = slicing.sizes(args, costs) if slices > 1 else ()
    return slicing.costs_in_slices(args, costs, slices, own)


def with_selective(args: Namespace, placement: Placement, selective: bool = True) -> Costs:
    """Return the costs of actions, with Megatron's selective recomputation or without.

    Raises:
        ValueError: as `_costs`, or they say nothing of it.
    """
    plain = copied(args, costs_of(args, placement), TRANSFERS[PARTNER])
    if not selective:
        return plain
    if not isinstance(args.times, StageCosts):
        raise ValueError(
            f'--actions {SELECTIVE}, but --times says nothing of it: give a file that has '
            f'"{SELECTIVE}": {{"B": [...], "activation": [...]}}'
        )
    found = costs_of(args, placement, selective=True)
    if TRANSFERS[HOST].out in found.times:
        return found
    # what is copied is less
    held = (costs.amounts['activation'] for costs in (found, plain))
    shares = [a / b if b else 1.0 for a, b in zip(*held, strict=True)]
    copies = {
        kind: tuple(time * share for time, share in zip(plain.times[kind], shares, strict=True))
        for kind in (*TRANSFERS[HOST], *TRANSFERS[PARTNER])
    }
    return found.with_times(**{**copies, **found.times})


def allowed_chunks(args: Namespace) -> list[int]:
    """Return the chunks per rank that `plan` may use."""
    stages = stages_of(args.times)
    allowed = args.vpp or ([1, 2, 4] if stages is None else [stages // args.pp])
    if isinstance(args.times, LayerCosts) and args.vpp is None:
        most = max(len(args.times.layers.splits()) + 1, args.pp)
        allowed = [chunks for chunks in allowed if args.pp * chunks <= most]
    return allowed if args.layers is None else _within(args, allowed)


def _within(args: Namespace, allowed: list[int]) -> list[int]:
    """Return the chunks per rank of which each stage still gets a layer."""
    fitting = [chunks for chunks in allowed if args.pp * chunks <= args.layers]
    if not fitting:
        fewest = args.pp * min(allowed)
        raise ValueError(
            f'--num-layers {args.layers} are fewer than {fewest} stages, of --pp {args.pp} and '
            f'--vpp {min(allowed)}: use fewer ranks or chunks'
        )
    return fitting
