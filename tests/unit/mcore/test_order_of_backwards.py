"""Which schedules Megatron's own offloading of activations fits: by the order of backwards."""

from __future__ import annotations

import pytest

from megatron_zbpp.ir import Pass, Placement, Schedule
from megatron_zbpp.mcore.own_offloading import fits
from megatron_zbpp.mcore.programs import Programs
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.schedules import build
from megatron_zbpp.techniques.offload.place import offloaded
from megatron_zbpp.techniques.recompute.place import recomputed

FITTING = (
    *('gpipe', '1f1b', '1f1b-pb', 'zb-h1', 'zb-h2'),
    *('interleaved', 'zb-interleaved', 'breadth-first', 'gis', 'gis-h', 'zeropp'),
)
OTHERS = (
    'zb-v',
    'v-half',
    '1f1b-v',
    'po',
    'hanayo',
    'dualpipe-v',
    'bpipe',
    'po-f',
)


@pytest.mark.parametrize('name', FITTING + OTHERS)
def test_by_name(name):
    assert fits(build(name, 4, 12)) == (name in FITTING)


@pytest.mark.parametrize('chunks', [3, 4])
@pytest.mark.parametrize('microbatches', [8, 10])
def test_more_chunks_and_microbatches_that_are_no_multiple(chunks, microbatches):
    assert fits(build('interleaved', 4, microbatches, num_chunks=chunks))


@pytest.mark.parametrize(
    ('order', 'right'),
    [
        ('0F0 0F1 1F0 1F1 1BW0 1BW1 0BW0 0BW1', True),
        ('0F0 0F1 1F0 1BW0 1F1 1BW1 0BW0 0BW1', True),
        ('0F0 0F1 1F0 1F1 1BW0 0BW0 1BW1 0BW1', False),  # the last chunk's run back first
        ('0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 0BW1', True),
        ('0F0 0F1 1F0 1BW0 0BW0 1F1 1BW1 0BW1', False),  # 0F0 is not known to be next by then
    ],
)
def test_two_chunks_of_a_rank(order, right):
    passes = [Pass.parse(word) for word in order.split()]
    assert fits(Schedule.of('mine', Placement.loop(1, 2), 2, [passes])) == right


def test_microbatches_that_run_back_in_another_order():
    passes = [Pass.parse(word) for word in '0F0 0F1 0BW1 0BW0'.split()]
    assert not fits(Schedule.of('mine', Placement.loop(1), 2, [passes]))


@pytest.mark.parametrize('moved', [offloaded, recomputed])
def test_not_beside_what_moves_or_runs_again(moved):
    assert not fits(moved(build('1f1b', 4, 8), 'all'))


def test_not_where_orders_change_or_forwards_are_taken_back():
    assert Programs(Settings('zb-h1')).in_order(4)
    assert not Programs(Settings('zb-h1', post_validation=True)).in_order(4)
    assert not Programs(Settings('auto', num_chunks=1)).in_order(4)
