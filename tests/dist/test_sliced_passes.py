"""Slices of sequences on plain torch stages: each slice reads what the slices before it left."""

from unittest import mock

import pytest
import torch
from stages import CPU, WIDTH, LinearStage, Pipeline

from megatron_zbpp.analysis.checker import check
from megatron_zbpp.ir import B, F, Pass, Placement, Schedule, chain
from megatron_zbpp.runtime.channels import Message
from megatron_zbpp.techniques.slices.graph import sliced

MICROBATCHES, SIZES = 2, (3, 1)  # rows of each slice
# of two ranks, microbatches and slices: by name, the order of each rank (SlimPipe, Seq1F1B)
ORDERS = {
    'seq1f1b': [
        '0F0.0 0F0.1 0F1.0 0BW0.1 0F1.1 0BW0.0 0BW1.1 0BW1.0',
        '1F0.0 1F0.1 1BW0.1 1F1.0 1BW0.0 1F1.1 1BW1.1 1BW1.0',
    ],
    'seq1f1b-zb': [
        '0F0.0 0F0.1 0F1.0 0B0.1 0W0.1 0F1.1 0B0.0 0W0.0 0B1.1 0W1.1 0B1.0 0W1.0',
        '1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1W0.1 1F1.1 1B1.1 1W0.0 1B1.0 1W1.1 1W1.0',
    ],
    'seq1f1b-interleaved': [
        '0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2BW0.1 2F1.0 2BW0.0 2F1.1 0BW0.1 0BW0.0 2BW1.1'
        ' 2BW1.0 0BW1.1 0BW1.0',
        '1F0.0 1F0.1 3F0.0 3F0.1 3BW0.1 1F1.0 3BW0.0 1F1.1 1BW0.1 3F1.0 1BW0.0 3F1.1 3BW1.1'
        ' 3BW1.0 1BW1.1 1BW1.0',
    ],
}


def schedule_of(texts, microbatches=MICROBATCHES):
    """Return the schedule of these orders, checked."""
    orders = tuple(tuple(map(Pass.parse, text.split())) for text in texts)
    stages = 1 + max(p.stage for order in orders for p in order)
    placement = Placement.loop(len(orders), stages // len(orders))
    graph = sliced(chain(stages), len(SIZES))
    made = Schedule('sliced', placement, microbatches, orders, graph=graph)
    check(made)
    return made


class PrefixStage(LinearStage):
    """Adds to each row the sum of the rows before it, in the slices before its own, too."""

    def __init__(self, *args):
        super().__init__(*args)
        self.starts, self.first = self.first, False  # inputs are made here
        self.before = {}  # by microbatch and slice, what its forward took
        self.after = {}  # what it left for the next

    def forward(self, p, received):
        if self.starts:
            rows = torch.arange(self.rows_of(p.slice)) + sum(SIZES[: p.slice])
            received = 0.1 * (p.microbatch + 1 + rows)[:, None].expand(-1, WIDTH)
        here = p.microbatch, p.slice
        start = self.after[p.microbatch, p.slice - 1].detach() if p.slice else torch.zeros(WIDTH)
        self.before[here] = start.requires_grad_()
        sums = received.cumsum(0) + start
        self.after[here] = sums[-1]
        return super().forward(p, sums)

    def rows_of(self, part):
        return SIZES[part]

    def backward(self, p, received, output, gradient):
        here = p.microbatch, p.slice
        outputs, gradients = [output], [gradient]
        if p.slice + 1 < len(SIZES):
            outputs.append(self.after[here])
            gradients.append(self.before.pop((p.microbatch, p.slice + 1)).grad)
        torch.autograd.backward(outputs, gradients)
        return None if received is None else received.grad


def execute(schedule):
    """Runs on each rank: losses and gradients by stage, and bytes that left."""
    messages = [Message((rows, WIDTH), torch.float32, CPU) for rows in SIZES]
    programs = check(schedule).programs
    pipeline = Pipeline(schedule, programs=programs, stage_class=PrefixStage, message=messages)
    record = pipeline.run()
    assert tuple(record.passes) == schedule.passes[pipeline.rank] and record.live[-1] == 0
    return pipeline.made, pipeline.moved


def in_turn(num_stages):
    """The same slices on one process: all forwards of a microbatch, then its backwards."""
    stages = [PrefixStage(None, stage, num_stages) for stage in range(num_stages)]
    for microbatch in range(MICROBATCHES):
        kept = {}
        for part in range(len(SIZES)):
            value = None
            for index, stage in enumerate(stages):
                received = None if value is None else value.detach().requires_grad_()
                value = stage.forward(Pass(F, index, microbatch, part), received)
                kept[index, part] = received, value
        for part in reversed(range(len(SIZES))):
            gradient = None
            for index in reversed(range(num_stages)):
                p = Pass(B, index, microbatch, part)
                gradient = stages[index].backward(p, *kept[index, part], gradient)
    return [(stage.losses, [p.grad for p in stage.parameters()]) for stage in stages]


def whole(num_stages):
    """The same sequences, not sliced: gradients of each stage."""
    stages = [LinearStage(None, stage, num_stages) for stage in range(num_stages)]
    for microbatch in range(MICROBATCHES):
        value = 0.1 * (microbatch + 1 + torch.arange(sum(SIZES)))[:, None].expand(-1, WIDTH)
        for stage in stages:
            stage.first = False
            value = stage.forward(Pass(F, 0, microbatch), value.cumsum(0))
        value.backward()
    return [[p.grad for p in stage.parameters()] for stage in stages]


def require_in_turn(schedule, results):
    """Require what each rank made to be what the slices make in turn, to the bit."""
    expected = in_turn(schedule.num_stages)
    for found, _ in results:
        for stage, (losses, gradients) in found.items():
            assert losses == expected[stage][0]
            assert all(map(torch.equal, gradients, expected[stage][1]))


@pytest.mark.parametrize('name', ORDERS)
def test_to_the_bit(ranks, name):
    """As the same slices in turn; and close to sequences that are not sliced."""
    schedule = schedule_of(ORDERS[name])
    results, close = ranks(2).run(execute, schedule), whole(schedule.num_stages)
    require_in_turn(schedule, results)
    for found, _ in results:
        for stage, (_, gradients) in found.items():
            for gradient, other in zip(gradients, close[stage], strict=True):
                torch.testing.assert_close(gradient, other)


@pytest.mark.on_ranks(1)
def test_a_slice_of_another_shape_is_named():
    """Where a slice has the rows of another."""
    order = '0F0.0 1F0.0 0F0.1 1F0.1 1BW0.1 0BW0.1 1BW0.0 0BW0.0'
    said = r'^F stage 0 microbatch 0 slice 1 made \(3, 6\) of torch.float32, but'
    rows = mock.patch.object(PrefixStage, 'rows_of', lambda self, part: SIZES[0])
    with rows, pytest.raises(ValueError, match=said):
        execute(schedule_of([order], microbatches=1))
