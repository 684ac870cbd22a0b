"""Two-way pipelines in training: pairs of data-parallel replicas whose ranks run one schedule.

Replica q runs with replica q + d of the 2d that there are. A chunk on the data of the wrong replica
would train on other labels without a word: what chunks read of each microbatch is compared in the
first iteration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.faces import CallContext, Face
from megatron_zbpp.mcore.iteration.stages import noting
from megatron_zbpp.mcore.session import Session

_Digests = list[dict[str, str]]  # of each item, by the place of a tensor in it


class TwoWay(Face):
    """Microbatches go both ways through the ranks of two replicas."""

    nest = 0  # it wraps nothing

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._chunks_asked_for: set[int] = set()  # the loop has asked whose data they read
        self._compared: set[bool] = set()  # values of forward_only whose data are compared
        # by stage of this rank, of the items that it reads; None: they are not compared
        self._digests: dict[int, _Digests] | None = None
        # by the group of a replica's pipeline: the group of the ranks that run one schedule
        self._pipelines: dict[dist.ProcessGroup, dist.ProcessGroup] = {}

    def data_parallel_rank(self, chunk: int) -> int | None:
        self._chunks_asked_for.add(chunk)
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        if ranks == 1:
            return None
        programs, size = self.session.programs, parallel_state.get_data_parallel_world_size()
        programs.require_pairs(size)
        replica = dist.get_rank(cast(dist.ProcessGroup, parallel_state.get_data_parallel_group()))
        copies, apart = programs.num_replicas, size // programs.num_replicas
        where = programs.whole_placement(ranks)
        rank = copies * parallel_state.get_pipeline_model_parallel_rank() + replica // apart
        stage = where.stages(rank)[chunk]
        (way,) = (way for way, route in enumerate(where.routes) if route[stage] == rank)
        return replica % apart + way * apart

    def pipeline(self, groups: ProcessGroupCollection) -> dist.ProcessGroup:
        """Return the group of the ranks that run one schedule; made once, by all in one order."""
        session, programs, pipeline = self.session, self.session.programs, groups.pp
        if pipeline not in self._pipelines:
            programs.require_pairs(groups.dp.size())
            placement = programs.placement(pipeline.size())
            ends, held = (0, placement.num_stages - 1), placement.stages(pipeline.rank())
            reading = {chunk for chunk, stage in enumerate(held) if stage in ends}
            unasked = bool(reading) and reading.isdisjoint(self._chunks_asked_for)
            apart = groups.dp.size() // programs.num_replicas
            pair = dist.get_process_group_ranks(groups.dp)[groups.dp.rank() % apart :: apart]
            found: list[Any] = [None] * dist.get_world_size()
            with session.collective('groups of the ranks of two replicas'):
                own = dist.get_process_group_ranks(pipeline), pair, unasked
                dist.all_gather_object(found, own)
                if any(unasked for *_, unasked in found):
                    raise ValueError(
                        f'with {programs.source.name} a chunk may read the data of another '
                        'replica, and this loop never asked whose: take '
                        'megatron_zbpp.data_parallel_rank(vp_stage) where it has '
                        'parallel_state.get_data_parallel_rank()'
                    )
                for ranks in sorted({_both(found, own) for own, *_ in found}):
                    group = dist.new_group(list(ranks))
                    if dist.get_rank() in ranks:
                        self._pipelines[pipeline] = cast(dist.ProcessGroup, group)
        return self._pipelines[pipeline]

    def begin(self, context: CallContext) -> None:
        forward_only = context.arguments.forward_only
        self._digests = None if forward_only in self._compared else {}
        self._compared.add(forward_only)

    def data(
        self, stages: Sequence[int], data: Sequence[Iterator | None]
    ) -> Sequence[Iterator | None]:
        def noted(stage: int, source: Iterator | None) -> Iterator | None:
            if source is None or self._digests is None:
                return source
            found = self._digests.setdefault(stage, [])
            return noting(source, lambda item: found.append(_digests(item)))

        return list(map(noted, stages, data))

    def ended(self, placement: Placement, pipeline: dist.ProcessGroup) -> None:
        own, self._digests = self._digests, None
        if own is None:
            return
        found: list[Any] = [None] * pipeline.size()
        with self.session.collective('comparison of the data that chunks have read'):
            dist.all_gather_object(found, own, group=pipeline)
        ranks = dist.get_process_group_ranks(pipeline)
        for route in placement.routes:
            read = [(ranks[rank], found[rank].get(s)) for s, rank in enumerate(route)]
            first, *others = [(rank, items) for rank, items in read if items] or [(0, [])]
            for other in others:
                _require_same(first, other)


def _both(found: list[Any], own: list[int]) -> tuple[int, ...]:
    ranks = tuple(member for rank in own for member in found[rank][1])
    if list(ranks) != sorted(ranks):
        raise ValueError(
            f'ranks {ranks} of a two-way pipeline are numbered replica by replica: drop '
            '--use-tp-pp-dp-mapping'
        )
    return ranks


def _require_same(one: tuple[int, _Digests], other: tuple[int, _Digests]) -> None:
    for j, (mine, theirs) in enumerate(zip(one[1], other[1], strict=False)):
        differ = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
        if differ:
            raise ValueError(
                f'data of rank {other[0]} are wrong because in its microbatch {j} '
                f'{", ".join(differ)} are not those of rank {one[0]}, whose microbatches it goes '
                'on with: let each chunk read the data of the data-parallel rank that '
                'megatron_zbpp.data_parallel_rank(vp_stage) returns'
            )


def _digests(item: Any, name: str = 'item') -> dict[str, str]:
    if isinstance(item, torch.Tensor):
        plain = item.detach().cpu().contiguous().flatten().view(torch.uint8)
        content = hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:16]
        return {name: f'{item.dtype}{tuple(item.shape)}{content}'}
    if isinstance(item, list | tuple):
        item = dict(enumerate(item))
    found: dict[str, str] = {}
    for key, part in item.items() if isinstance(item, Mapping) else ():
        found |= _digests(part, f'{name}[{key!r}]')
    return found
