"""Slices by the shape of the model: they leave what the sizes leave that are said."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
from grids import grid
from models import Job, assert_same, train
from nvidia import needs_training, run
from supported import supports
from test_launch import NO_CLIPPING, PIPELINE

LONG = ['--seq-length', '1024']


@contextmanager
def told(_=None):
    """What the plugin logs of slices within the block."""
    said = []
    listening = logging.Handler()
    listening.addFilter(lambda record: record.getMessage().startswith('slices '))
    listening.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger('megatron_zbpp')
    logger.addHandler(listening)
    try:
        yield said
    finally:
        logger.removeHandler(listening)


def sizes_in(line):
    """The sizes that a line says."""
    return re.search(r'--pipeline-slices ([\d,]+), which', line)[1]


def sliced(slices, job, argv):
    """Runs on a rank: trains by `megatron_zbpp.enable(slices=)`; also returns what it said."""
    import pretrain_gpt as script

    import megatron_zbpp

    enable = partial(megatron_zbpp.enable, slices=slices)
    with told() as said, mock.patch.object(script.megatron_zbpp, 'enable', enable):
        return train(job, argv), said


@supports('slices of sequences that are found: {slices}', '{schedule}')
@grid(slices=('auto:200', 'balanced:3'), schedule=('zb-v', '1f1b'))
def test_at_the_first_call(ranks, data, slices, schedule):
    """Said once, by one rank; given as they are said, they leave the same bits."""
    job = Job(te=False, iterations=2, microbatches=2)
    argv = [*job.argv(schedule, False, data), *LONG]
    found = ranks(2).run(sliced, slices, job, argv)
    lines = [line for _, own in found for line in own]
    assert len(lines) == 1 and lines[0].startswith(f'slices {slices}: as --pipeline-slices ')
    sizes = sizes_in(lines[0])
    pinned = ranks(2).run(sliced, sizes, job, argv)
    assert not any(own for _, own in pinned)
    left = ([trained for trained, _ in each] for each in (found, pinned))
    assert_same(*left, job.iterations)
    tokens = list(map(int, sizes.split(',')))
    assert len(tokens) == {'auto:200': 4, 'balanced:3': 3}[slices]
    assert tokens[0] > tokens[-1] and sum(tokens) == 1024


@pytest.mark.full
@supports("NVIDIA's loop: slices of sequences that are found", 'zb-v')
@needs_training
def test_nvidias_loop(ranks):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 2, '--global-batch-size', 2]
    flags += [*LONG, '--max-position-embeddings', 1024, '--pipeline-schedule', 'zb-v']
    found = run(ranks(2), *flags, '--pipeline-slices', 'balanced:3', event=told)
    (line,) = (line for lines in found.reported for line in lines)
    pinned = run(ranks(2), *flags, '--pipeline-slices', sizes_in(line))
    assert found.losses == pinned.losses and found.parameters == pinned.parameters
