"""List scheduling: each rank, whenever it is free, picks what to run next.

For the families whose order is no closed form. It keeps a clock of its own, because what is ready
depends on when inputs arrive: by the times of `costs`, or by equal ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from megatron_zbpp.ir import BW, B, F, Pass, Placement, Schedule, W

if TYPE_CHECKING:
    pass

_ROUNDING = 1e-9  # relative: three thirds of an activation are one


@dataclass(frozen=True)
class EqualCosts:
    """Stands in for `Costs` where there are none: each F, B and W takes time 1, no communication.

    A full rank holds one activation a microbatch, all of it until W.
    """

    placement: Placement
    edge: float = 0.0

    def time(self, kind: str, stage: int) -> float:
        return 2.0 if kind == BW else 1.0

    @property
    def activation(self) -> tuple[float, ...]:
        return tuple(1 / len(self.placement.stages(rank)) for rank in self.placement.ranks)

    retained = activation


Lanes = Sequence[Iterable[Pass]]


def dispatch(name, placement, num_microbatches, lanes, costs=None, memory_limit=math.inf, patience=0.0, reserve=True):
    costs = costs or EqualCosts(placement)
    p, S, ranks = placement.num_ranks, placement.num_stages, placement.ranks
    if isinstance(memory_limit,(int,float)): memory_limit=[memory_limit]*p
    limits=[x*(1+_ROUNDING) for x in memory_limit]
    act=costs.activation; ret=costs.retained
    room=[0.0]*S
    for s in range(S):
        room[s]=sum(act[x] for x in placement.stages(ranks[s]) if x>=s) if reserve else act[s]
    queues=[[deque(l) for l in ls] for ls in lanes]
    left=sum(len(q) for ls in queues for q in ls)+sum(1 for ls in queues for q in ls for x in q if x.kind==B)
    arrival={Pass(F,0,i):0.0 for i in range(num_microbatches)}
    pending=[deque() for _ in range(p)]   # (time, W)
    free=[0.0]*p; held=[0.0]*p; orders=[[] for _ in range(p)]
    bkind={}
    for ls in queues:
        for q in ls:
            for x in q:
                if x.kind!=F: bkind[x.stage,x.microbatch]=x.kind
    wakes=[(0.0,r) for r in range(p)]
    while wakes:
        now,r=heappop(wakes)
        if free[r]>now: continue
        pick=None; soon=math.inf
        for q in queues[r]:
            if q:
                x=q[0]
                t=arrival.get(x,math.inf)
                if x.kind==F and held[r]+room[x.stage]>limits[r]: continue
                if t<=now: pick=x; q.popleft(); break
                soon=min(soon,t)
        if pick is None and pending[r]:
            t,x=pending[r][0]
            if t<=now and not soon<now+patience*costs.time(W,x.stage):
                pick=x; pending[r].popleft()
        if pick is None: continue
        k,s,i=pick
        end=now+costs.time(k,s)
        free[r]=end; orders[r].append(pick); left-=1
        heappush(wakes,(end,r))
        if k==F:
            held[r]+=act[s]
            nxt=Pass(F,s+1,i) if s<S-1 else Pass(bkind[s,i],s,i)
        elif k==W: held[r]-=ret[s]; nxt=None
        else:
            nxt=Pass(bkind[s-1,i],s-1,i) if s else None
            if k==B: pending[r].append((end,pick._replace(kind=W))); held[r]-=act[s]-ret[s]
            else: held[r]-=act[s]
        if nxt is not None:
            r2=ranks[nxt.stage]
            t=end+(costs.edge if r2!=r else 0.0)
            arrival[nxt]=t
            if r2!=r: heappush(wakes,(t,r2))
    if left:
        raise ValueError('stuck')
    return Schedule.of(name,placement,num_microbatches,orders)
