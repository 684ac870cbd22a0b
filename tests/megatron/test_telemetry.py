"""Spans of passes and messages, by the library that Megatron's telemetry is made with."""

import importlib
import json
import os
import re
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import commands
import nvidia
import pytest
import torch.distributed as dist
import wheels
from models import Job, train
from ranks import Pool, Ranks
from stages import TimedPipeline
from supported import absent, supports

from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.schedules import build

P, M, ITERATIONS = 3, 4, 2
PASSES, MESSAGES = 'microbatch', 'communication'


def see(folder):
    """Before all else: lets nemo-lens be found."""
    sys.path.insert(0, str(folder))


def nemo_lens():
    """The folder of its sources."""
    if sys.version_info < (3, 12):
        pytest.skip('its metadata ask for Python 3.13, its code for 3.12')
    return wheels.unpacked('nemo-lens', '0.1.0', '--ignore-requires-python')


@pytest.fixture(scope='module')
def lens_ranks():
    """As `ranks`, with nemo-lens: in processes of their own, which others do not get."""
    pool = Pool(see, nemo_lens())
    yield lambda size: Ranks(size, pool)
    pool.stop()


@contextmanager
def exporting(groups):
    """Telemetry with these groups on: yields its tracer, and where spans go."""
    from nemo.lens.state import set_enabled_span_groups
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = trace.get_tracer('test', tracer_provider=provider)
    set_enabled_span_groups(frozenset(groups))
    # a process takes one provider for ever
    with mock.patch.object(trace, 'get_tracer', lambda name: tracer):
        yield tracer, kept
    set_enabled_span_groups(frozenset())


def exported(name, groups, ranks):
    """What a rank exports of two iterations: name, span and parent, links, times, attributes."""
    from nemo.lens.helpers import managed_span

    spans = importlib.import_module('megatron_zbpp.guests.telemetry')
    guest, pipeline = spans.Spans(), TimedPipeline(build(name, P, M), HostClock())
    with exporting(groups if dist.get_rank() in ranks else ()) as (tracer, kept):
        for _ in range(ITERATIONS):
            with managed_span('step', 'megatron.train_step', tracer):
                guest.before(None)
                guest.after(pipeline.run(), None)
    return [
        (
            span.name,
            (span.context.trace_id, span.context.span_id),
            span.parent and span.parent.span_id,
            [(link.context.trace_id, link.context.span_id) for link in span.links],
            (span.start_time, span.end_time),
            dict(span.attributes),
        )
        for span in kept.get_finished_spans()
    ]


def of_one(found, name):
    return [span for span in found if span[0] == name]


ALL = ('step', PASSES, MESSAGES)
# how far the other rank of a message is
PEERS = {'recv_forward': -1, 'send_forward': 1, 'recv_backward': 1, 'send_backward': -1}


def test_passes_and_messages(lens_ranks):
    """A message has come when its sender has begun to send it, whose span of the same iteration it
    is linked to."""
    found = lens_ranks(P).run(exported, 'zb-h1', ALL, range(P))
    steps = [of_one(each, 'megatron.train_step') for each in found]
    for rank, spans in enumerate(found):
        counts = Counter(name.rpartition('.')[2] for name, *_ in spans)
        messages = {kind: peer for kind, peer in PEERS.items() if rank + peer in range(P)}
        expected = dict.fromkeys(('weight_gradient', *messages), ITERATIONS * M)
        assert counts == expected | {'train_step': ITERATIONS}
        for name, _, parent, links, (start, end), attributes in spans:
            if name == 'megatron.train_step':
                continue
            kind, microbatch = name.rpartition('.')[2], attributes['megatron.microbatch_id']
            assert name == f'megatron.{"p2p" if kind in PEERS else "microbatch"}.{kind}'
            (at,) = [i for i, step in enumerate(steps[rank]) if step[1][1] == parent]
            assert (
                attributes['dl.pipeline_parallel.rank'] == attributes['megatron.pp.stage'] == rank
            )
            assert microbatch in range(M) and start <= end
            assert attributes['megatron.pp.slice'] == 0
            peer = attributes.get('megatron.pp.peer')
            assert peer == (rank + PEERS[kind] if kind in PEERS else None)
            assert links == ([steps[peer][at][1]] if 'recv' in kind else [])
            if links:
                sends = of_one(found[peer], name.replace('recv', 'send'))
                (sent,) = [
                    times[0]
                    for _, _, within, _, times, of in sends
                    if (within, of['megatron.microbatch_id']) == (links[0][1], microbatch)
                ]
                assert sent <= end


def test_ranks_that_do_not_export(lens_ranks):
    """By default one rank does: nobody waits for a context that no rank leaves."""
    *others, last = lens_ranks(P).run(exported, 'zb-h1', ALL, [P - 1])
    assert not any(others)
    assert {tuple(links) for _, _, _, links, *_ in last} == {()}


@pytest.mark.parametrize(('group', 'has'), [(PASSES, 'microbatch'), (MESSAGES, 'p2p'), ('job', '')])
def test_groups(lens_ranks, group, has):
    found = lens_ranks(P).run(exported, 'zb-h1', [group], range(P))
    assert {name.split('.')[1] for name, *_ in found[1]} == ({has} if has else set())


def test_other_kinds(lens_ranks):
    """A backward of both is Megatron's; two stages a rank, where some messages stay on it."""
    whole, *_ = lens_ranks(P).run(exported, '1f1b', ALL, range(P))
    assert not of_one(whole, 'megatron.microbatch.weight_gradient')
    found = lens_ranks(P).run(exported, 'zb-v', ALL, range(P))
    received = [of_one(each, 'megatron.p2p.recv_forward') for each in found]
    assert len(of_one(found[0], 'megatron.microbatch.weight_gradient')) == 2 * M * ITERATIONS
    assert {span[-1]['megatron.pp.stage'] for span in received[2]} == {2}
    assert len(received[1]) == 2 * M * ITERATIONS


def trained(job, argv):
    """What a training leaves, and how many spans of each name it exports."""
    with exporting(ALL) as (_, kept):
        found = train(job, argv)
    return found, Counter(span.name for span in kept.get_finished_spans())


def test_a_training(lens_ranks, data):
    """As without, to the bit: whoever has the library gets spans."""
    job = Job('dense', te=False)
    argv = job.argv('zb-v', False, data)
    found = lens_ranks(job.size).run(trained, job, argv)
    plain = lens_ranks(job.size).run(without, job, argv)
    for rank, ((left, names), other) in enumerate(zip(found, plain, strict=True)):
        assert (left.losses, left.norms) == (other.losses, other.norms)
        passes = 2 * job.microbatches * job.iterations
        assert names['megatron.microbatch.weight_gradient'] == passes
        assert names[f'megatron.p2p.recv_{"backward" if rank else "forward"}'] == passes // 2


SPAN = re.compile(r'^\{\n.*?^\}$', re.DOTALL | re.MULTILINE)


def printed(folder, lens, *more):
    """What each rank of NVIDIA's loop on main exports to its own output, as torchrun keeps it."""
    words = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
    words += ['--redirects=1', f'--log-dir={folder}', '-m', 'megatron_zbpp.launch', '--cpu']
    words += [nvidia.SCRIPT, *nvidia.COMMON, '--pipeline-model-parallel-size=2', *more]
    words += ['--global-batch-size=4', f'--train-iters={ITERATIONS}']
    words += ['--otel-enabled', '--otel-span-groups=per_step,microbatch,communication']
    path = [str(lens), nvidia.CHECKOUT, os.environ.get('PYTHONPATH', '')]
    env = {'MEGATRON_OTEL_EXPORTER': 'console', 'MEGATRON_OTEL_EXPORT_STRATEGY': 'all_ranks'}
    env |= {'MEGATRON_OTEL_METRICS_ENABLED': '0', 'PYTHONPATH': os.pathsep.join(filter(None, path))}
    done = commands.run(words, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = sorted(folder.rglob('stdout.log'), key=lambda file: int(file.parent.name))
    return [[json.loads(each) for each in SPAN.findall(file.read_text())] for file in ranks]


@pytest.mark.full
@supports("NVIDIA's loop: `--otel-enabled`, spans of all ranks", 'zb-v')
def test_nvidias_loop(tmp_path, record_property):
    """By its own flags: its spans stay, ours lie inside those of its iterations, linked."""
    if not nvidia.CHECKOUT or '--otel-enabled' not in arguments(nvidia.CHECKOUT):
        absent('telemetry came with main of 2026')
    record_property('megatron', nvidia.release())
    lens = nemo_lens()
    theirs = printed(tmp_path / 'theirs', lens)
    ours = printed(tmp_path / 'ours', lens, '--pipeline-schedule=zb-v')
    iteration = 'megatron.train.iteration.forward_backward'
    passes = [
        [span['context']['span_id'] for span in spans if span['name'] == iteration]
        for spans in ours
    ]
    assert [len(each) for each in passes] == [ITERATIONS] * 2
    for rank, (stock, spans) in enumerate(zip(theirs, ours, strict=True)):
        names = Counter(span['name'] for span in spans)
        assert {span['name'] for span in stock} <= names.keys()
        for kind in ('forward', 'backward', 'weight_gradient'):
            assert names[f'megatron.microbatch.{kind}'] == 2 * M * ITERATIONS
        messages = [span for span in spans if span['name'].startswith('megatron.p2p.recv')]
        assert len(messages) == 2 * M * ITERATIONS
        for span in messages:
            (link,) = span['links']
            # the same iteration of the sender's
            at = passes[rank].index(span['parent_id'])
            assert passes[1 - rank][at] == link['context']['span_id']


def arguments(checkout):
    return Path(checkout, 'megatron/training/arguments.py').read_text()


def without(job, argv):
    """The same training where nobody has imported the library."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition('.')[0] == 'nemo']:
            del sys.modules[name]
        return train(job, argv)
