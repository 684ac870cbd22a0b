"""Which backend carries what, and what groups for messages inherit."""

import os
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from devtools import nccl
from megatron_zbpp.analysis.program import Send
from megatron_zbpp.ir import F, Pass
from megatron_zbpp.runtime import groups
from megatron_zbpp.runtime.channels import Channels, Message

CPU, CUDA = torch.device('cpu'), torch.device('cuda', 0)


@pytest.mark.parametrize(
    ('config', 'on_gpu', 'host'),
    [
        ('cpu:gloo,cuda:gloo', 'gloo', 'cpu'),
        ('cpu:gloo,cuda:nccl', 'nccl', 'cpu'),  # what get_backend calls by both, or 'undefined'
        ('cpu:ucc,cuda:ucc', 'ucc', 'cpu'),
        ('cuda:nccl', 'nccl', 'cuda'),
    ],
)
def test_backend_of_a_device(monkeypatch, config, on_gpu, host):
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: config)
    assert groups.backend_for(None, CUDA) == on_gpu
    assert groups.host_device(None) == host


def test_a_device_that_no_backend_takes(monkeypatch):
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: 'cuda:nccl')
    with pytest.raises(ValueError, match='backends for cuda, but the model is on cpu'):
        groups.backend_for(None, CPU)


@pytest.mark.skipif(not dist.is_nccl_available(), reason='this torch is built without NCCL')
@pytest.mark.parametrize(
    ('given', 'asked', 'expected'),
    [
        ({}, {}, 2),
        ({}, {'ctas': 1}, 1),
        ({'max_ctas': 16}, {}, 16),
        ({'min_ctas': 8}, {}, 8),
        ({}, {'high_priority': False}, 2),
    ],
)
@pytest.mark.parametrize('high', [False, True])
def test_messages_take_few_processors(monkeypatch, given, asked, expected, high):
    """Unless --nccl-communicator-config-path says how many; what it says otherwise stays.

    They start before what is queued with them, unless it is asked for the priority of the group.
    """
    theirs = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
    theirs._timeout = timedelta(minutes=3)
    theirs.config.cga_cluster_size = 2
    for name, value in given.items():
        setattr(theirs.config, name, value)
    before = theirs.config.max_ctas
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=theirs))
    monkeypatch.setattr(dist, 'get_backend_config', lambda group: 'cuda:nccl')
    like = groups.like(group, CUDA, groups.MessageKernels(**asked))
    assert like['backend'] == 'nccl' and like['timeout'] == timedelta(minutes=3)
    ours = like['pg_options']
    assert ours.is_high_priority_stream == (high or asked.get('high_priority', True))
    assert ours.config.cga_cluster_size == 2
    assert ours.config.max_ctas == expected
    assert theirs.config.max_ctas == before


@pytest.mark.on_ranks(2)
def test_timeout_of_the_pipeline():
    """Channels' groups have it, and not that of the world."""
    with nccl.Device():
        limit = timedelta(minutes=7)
        pipeline = dist.new_group(backend=nccl.NAME, timeout=limit)
        made = groups.directions(pipeline, CPU, [(0, 1), (1, 0)])
        gloo = dist.new_group(timeout=limit)
        made |= groups.directions(gloo, CPU, [(0, 1)])
        assert [group._get_backend(CPU).options._timeout for group in made.values()] == [limit] * 2


def first_messages(absent):
    """What this rank waits for, in order, until all ranks but `absent` have used their channels."""
    met = []

    @contextmanager
    def collective(what):
        met.append(what)
        yield

    around = {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)}
    dist.barrier()  # from here on ranks are quick
    try:
        with nccl.Device(**{} if absent is None else {'patience': 4}):
            group = dist.new_group(backend=nccl.NAME)
            if dist.get_rank() == absent:  # makes them with the others, and uses none
                groups.directions(group, CPU, around)
            else:
                Channels(group, around, CPU, collective)
    except nccl.Stuck as stuck:
        return met, str(stuck)
    return met, None


def test_channels_are_used_once(ranks):
    results = ranks(3).run(first_messages, None)
    making = 'making of the groups for messages between stages'
    used = [f'first message from pipeline rank {pair}' for pair in ('2 to 0', '1 to 2', '2 to 1')]
    assert results[2] == ([making, *used], None)


def test_a_rank_that_does_not_come_is_named(ranks):
    results = ranks(3).run(first_messages, 2)
    assert results[1][0][-1] == 'first message from pipeline rank 1 to 2'
    assert 'make a communicator for a send to rank 2' in results[1][1]


# how many sends a rank holds: right after one, once it has left, and when asked to let go
@pytest.mark.parametrize(
    ('backend', 'expected'), [(nccl.NAME, [1, 1, 0, 0]), ('gloo', [1, 1, 1, 0])]
)
@pytest.mark.on_ranks(2)
def test_what_has_left_is_let_go(backend, expected):
    """At the next pass, whether it sends or not; on gloo, which cannot tell, at the end."""
    device = nccl.Device() if backend == nccl.NAME else nullcontext()
    with device:
        group = dist.new_group(backend=backend)
        channels = Channels(group, [(0, 1)], CPU)
        held = []

        def look():
            held.append(sum(map(len, channels._unfinished.values())))

        if channels.rank == 0:
            channels.send(torch.ones(3), Send(Pass(F, 0, 0), Pass(F, 1, 0), 1, 2))
            channels.let_go()
            look()
        dist.barrier()  # now the peer takes it
        if channels.rank == 1:
            channels.post(Message((3,), torch.float32, CPU), 0).wait()
        dist.barrier()
        if channels.rank == 0 and backend == nccl.NAME:
            ((work, *_),) = channels._unfinished[1]
            work.wait()
        look()
        channels.let_go()
        look()
        channels.finish()
        look()
        dist.barrier()
    assert channels.rank or held == expected


def process_of_a_rank(watched):
    if watched:
        threading.Thread(target=threading.Event().wait, name='watchdog', daemon=True).start()
    return os.getpid()


def test_a_process_that_ended_or_is_to_end_is_not_called_again(ranks):
    watched = ranks(2).run(process_of_a_rank, True)
    others = ranks(2).run(process_of_a_rank, False)
    assert not {*watched} & {*others}
    killed = psutil.Process(others[0])
    killed.kill()
    psutil.wait_procs([killed])
    assert not {*others} & {*ranks(2).run(process_of_a_rank, False)}
