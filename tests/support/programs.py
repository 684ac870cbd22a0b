"""Programs of whole pipelines, changed and timed: for tests of what may make them wait."""

import itertools
from collections import defaultdict, deque
from dataclasses import replace

from megatron_zbpp.analysis.deadlock import Collective
from megatron_zbpp.analysis.program import Join, Receive, Send
from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import BW, F, Pass, W, chain
from megatron_zbpp.ir.costs import Costs


def posted_earlier(programs, lead):
    """The same programs with each receive before the `lead` passes that precede it."""
    return tuple(tuple(_posted_earlier(program, lead)) for program in programs)


def _posted_earlier(program, lead):
    waiting, passes = deque(), 0  # the last `lead` passes, and what follows each
    for instruction in program:
        if isinstance(instruction, Receive):
            yield instruction
            continue
        waiting.append(instruction)
        passes += isinstance(instruction, Pass)
        while waiting and (passes > lead or not isinstance(waiting[0], Pass)):
            passes -= isinstance(waiting[0], Pass)
            yield waiting.popleft()
    yield from waiting


def posted_later(programs):
    """Yield each receive that may be behind the next pass, with the programs where it is."""
    for rank, program in enumerate(programs):
        for at, receive in enumerate(program):
            if not isinstance(receive, Receive) or receive.saved:
                continue
            end = next(i for i in range(at, len(program)) if isinstance(program[i], Pass)) + 1
            over = program[at + 1 : end]
            overtakes = any(isinstance(i, Receive) and i.peer == receive.peer for i in over)
            if over[-1] != receive.consumer and not overtakes:
                moved = (*program[:at], *over, receive, *program[end:])
                yield receive, (*programs[:rank], moved, *programs[rank + 1 :])


def pairs(programs, saved=False):
    """Who sends to whom: messages, or what forwards have saved."""
    return {
        (rank, i.peer)
        for rank, program in enumerate(programs)
        for i in program
        if isinstance(i, Send) and i.saved == saved
    }


def side_by_side(*pipelines):
    """Programs of several pipelines as those of one world, with what their ranks do together.

    Ranks of the same place meet in each pass (tensor parallelism: its kernels and a collective take
    turns), and once a stage's weight gradients are complete (overlapped reduction). In the end all
    ranks of a pipeline's ends meet (tied embeddings), then the world (the norm of the gradients).
    """
    size = len(pipelines[0])
    world = tuple(range(size * len(pipelines)))
    for shift, programs in zip(range(0, len(world), size), pipelines, strict=True):
        ends = Collective(f'tied layers {shift}', tuple(sorted({shift, shift + size - 1})))
        for place, program in enumerate(programs):
            same = tuple(range(place, len(world), size))
            complete = {p.stage: p for p in program if isinstance(p, Pass) and p.kind in (W, BW)}
            met = []
            for i in program:
                if isinstance(i, Pass):
                    inside = Collective(f'all-reduce in {i}', same)
                    behind = Collective(f'reduction of stage {i.stage}', same)
                    met += [inside, i, *([behind] if complete.get(i.stage) == i else [])]
                else:
                    met.append(i._replace(peer=i.peer + shift) if hasattr(i, 'peer') else i)
            tied = [ends] if place in (0, size - 1) else []
            yield (*met, *tied, Collective('norm of the gradients', world))


class Timing:
    """What programs take on streams: passes on one, the messages of each connection on another.

    With `streams` a receive starts when the passes launched before it have ended, as NCCL's do that
    are called on the stream of the passes; else when its message is sent. With `in_order`
    everything on a rank starts in the order of its program.
    """

    def __init__(self, programs, costs, streams, in_order):
        self.costs, self.streams, self.in_order = costs, streams, in_order
        self.computed = [0.0] * len(programs)
        self.launched = [0.0] * len(programs)
        self.sent, self.posted, self.ended = defaultdict(list), defaultdict(list), defaultdict(list)
        self.arrived, self.takers = {}, defaultdict(list)
        self.awaited = {
            i.consumer for program in programs for i in program if isinstance(i, Receive)
        }
        left = [deque(program) for program in programs]
        while sum(self._advance(rank, program) for rank, program in enumerate(left)):
            pass
        assert not any(left), 'stuck'

    @property
    def makespan(self):
        return max(self.computed)

    def _advance(self, rank, program):
        before = len(program)
        while program and self._step(rank, program[0]):
            program.popleft()
        return len(program) < before

    def _step(self, rank, i):
        if isinstance(i, Pass):
            if i in self.awaited and i not in self.arrived:
                return False
            start = self._start(rank, max(self.computed[rank], self.arrived.get(i, 0.0)))
            self.computed[rank] = start + self.costs.duration(
                chain(self.costs.num_stages), i.kind, i.stage, rank
            )
        elif isinstance(i, Send):
            return self._begin(rank, (rank, i.peer), self.sent, self.computed[rank])
        elif isinstance(i, Receive):
            self.takers[i.peer, rank].append(i.consumer)
            free = self.computed[rank] if self.streams else 0.0
            if not self._begin(rank, (i.peer, rank), self.posted, free):
                self.takers[i.peer, rank].pop()
                return False
        return True

    def _begin(self, rank, channel, begun, free):
        ended = self.ended[channel]
        if self.in_order and len(ended) < len(begun[channel]):
            return False  # the one before has not ended: nothing behind may start
        if self.in_order and ended:
            free = max(free, ended[-1])
        begun[channel].append(self._start(rank, free))
        for k in range(len(ended), min(len(self.sent[channel]), len(self.posted[channel]))):
            start = max(self.sent[channel][k], self.posted[channel][k], *ended[-1:])
            ended.append(start + self.costs.edge(*channel))
            self.arrived[self.takers[channel][k]] = ended[-1]
        return True

    def _start(self, rank, free):
        if self.in_order:
            free = self.launched[rank] = max(free, self.launched[rank])
        return free


def in_flight(programs):
    """Return how many receives are posted and not taken yet while passes run: mean and most."""
    counts = []
    for program in programs:
        posted = []
        for i in program:
            if isinstance(i, Receive) and not i.saved:
                posted.append(i.consumer)
            elif isinstance(i, Pass):
                posted = [consumer for consumer in posted if consumer != i]
                counts.append(len(posted))
    return sum(counts) / len(counts), max(counts)


def awaited_early(programs):
    """Return how many forwards' messages are awaited before a pass that takes another, and all."""
    early = count = 0
    for program in programs:
        posted, joined = [], ()
        for i in program:
            if isinstance(i, Join):
                joined = i.passes
            elif isinstance(i, Pass):
                early += sum(consumer not in (i, *joined) for consumer in posted)
                posted, joined = [], joined if i in joined else ()
            elif isinstance(i, Receive) and i.consumer.kind == F:
                posted.append(i.consumer)
                count += 1
    return early, count


def spinning(schedule, programs, comm=0.02):
    """Return the share of passes' time beside which receives spin, and beside which anything does.

    A receive spins from its posting until its message has come; a send from the end of its pass
    until its receive has been posted, and while the message travels.
    """
    timeline = simulate(schedule, replace(Costs.uniform(schedule.placement), comm=comm))
    ends = {
        p: end
        for order, spans in zip(schedule.passes, timeline.spans, strict=True)
        for p, (_, end) in zip(order, spans, strict=True)
    }
    posted = {}
    for program in programs:
        free = 0.0
        for i in program:
            if isinstance(i, Pass):
                free = ends[i]
            elif isinstance(i, Receive):
                posted[i.producer, i.consumer] = free
    receives, sends = ([[] for _ in programs] for _ in '12')
    for rank, program in enumerate(programs):
        for i in (each for each in program if isinstance(each, Send)):
            sent, begun = ends[i.producer], posted[i.producer, i.consumer]
            come = max(sent, begun) + comm
            receives[i.peer].append((begun, come))
            sends[rank].append((sent, come))
    busy = sum(end - start for spans in timeline.spans for start, end in spans)
    each = [
        (_overlap(spans, own), _overlap(spans, own + theirs))
        for spans, own, theirs in zip(timeline.spans, receives, sends, strict=True)
    ]
    return tuple(sum(share) / busy for share in zip(*each, strict=True))


def _overlap(spans, others):
    """Return for how long a pass runs and at least one of the others does."""
    times = sorted({time for span in (*spans, *others) for time in span})
    return sum(
        stop - start
        for start, stop in itertools.pairwise(times)
        if all(any(a <= start and stop <= b for a, b in each) for each in (spans, others))
    )
