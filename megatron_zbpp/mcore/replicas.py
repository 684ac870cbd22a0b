"""Two-way pipelines: pairs of data-parallel replicas whose ranks run one schedule.

Replica q runs with replica q + d of the 2d that there are. Where all microbatches go one way, a
pipeline is a replica, as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

if TYPE_CHECKING:
    from megatron_zbpp.mcore.programs import Programs
    from megatron_zbpp.mcore.session import Session


def require_pairs(programs: Programs, size: int) -> None:
    """Check that the number of replicas is even, so that they form pairs.

    Raises:
        ValueError: they cannot.
    """
    copies = programs.num_replicas
    if size % copies:
        raise ValueError(
            f'data-parallel size {size} is wrong because {programs.name} runs on pairs of '
            'replicas: give an even number of them, by twice or half the ranks'
        )


def pipeline(session: Session, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    """Return the group of the ranks that run one schedule; made once, by all ranks in one order.

    Raises:
        ValueError: the number of replicas is odd, the loop never asked whose data a chunk reads,
            or ranks are numbered otherwise than by pipeline rank before replica.
    """
    copies = session.programs.num_replicas
    if copies == 1:
        return groups.pp
    if groups.pp not in session.pipelines:
        from megatron_zbpp.mcore.reading import require_asked

        require_pairs(session.programs, groups.dp.size())
        pair, pipeline = _pair(groups.dp, copies), groups.pp
        found: list[Any] = [None] * dist.get_world_size()
        with session.collective('groups of the ranks of two replicas'):
            own = dist.get_process_group_ranks(pipeline), pair, _reads_unasked(session, pipeline)
            dist.all_gather_object(found, own)
            require_asked(session.programs.name, not any(unasked for *_, unasked in found))
            for ranks in sorted({_both(found, own) for own, *_ in found}):
                group = dist.new_group(list(ranks))
                if dist.get_rank() in ranks:
                    session.pipelines[groups.pp] = cast(dist.ProcessGroup, group)
    return session.pipelines[groups.pp]


def _pair(replicas: dist.ProcessGroup, copies: int) -> list[int]:
    apart = replicas.size() // copies
    return dist.get_process_group_ranks(replicas)[replicas.rank() % apart :: apart]


def _both(found: list[Any], own: list[int]) -> tuple[int, ...]:
    ranks = tuple(member for rank in own for member in found[rank][1])
    if list(ranks) != sorted(ranks):
        raise ValueError(
            f'ranks {ranks} of a two-way pipeline are numbered replica by replica: drop '
            '--use-tp-pp-dp-mapping'
        )
    return ranks


def _reads_unasked(session: Session, pipeline: dist.ProcessGroup) -> bool:
    where = session.programs.placement(pipeline.size())
    chunks = enumerate(where.stages(pipeline.rank()))
    reading = {chunk for chunk, stage in chunks if stage in (0, where.num_stages - 1)}
    return bool(reading) and reading.isdisjoint(session.chunks_asked_for)


def data_parallel_rank(session: Session, chunk: int) -> int:
    """Return the data-parallel rank whose data a chunk of this rank reads."""
    programs = session.programs
    session.chunks_asked_for.add(chunk)
    replica = dist.get_rank(cast(dist.ProcessGroup, parallel_state.get_data_parallel_group()))
    copies, ranks = programs.num_replicas, parallel_state.get_pipeline_model_parallel_world_size()
    if copies == 1 or ranks == 1:
        return replica
    require_pairs(programs, parallel_state.get_data_parallel_world_size())
    apart = parallel_state.get_data_parallel_world_size() // copies
    where = programs.whole_placement(ranks)
    rank = copies * parallel_state.get_pipeline_model_parallel_rank() + replica // apart
    stage = where.stages(rank)[chunk]
    (way,) = (way for way, route in enumerate(where.routes) if route[stage] == rank)
    return replica % apart + way * apart
