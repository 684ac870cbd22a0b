"""Values: what the tasks of a pipeline are, where they run, and when. No torch, no Megatron."""

from megatron_zbpp.ir.graph import BW, B, F, Graph, Hold, Kind, Need, Task, W, chain
from megatron_zbpp.ir.placement import Placement
from megatron_zbpp.ir.schedule import Pass, Phase, Schedule, Together

KINDS = tuple(chain(1).kinds)  # of a plain pipeline

__all__ = [
    'BW',
    'KINDS',
    'B',
    'F',
    'Graph',
    'Hold',
    'Kind',
    'Need',
    'Pass',
    'Phase',
    'Placement',
    'Schedule',
    'Task',
    'Together',
    'W',
    'chain',
]
