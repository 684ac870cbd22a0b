"""What a model's shape says of its stages, beside what they take: Megatron's models on this CPU."""

import time
from statistics import median
from unittest import mock

import pytest
import torch
from example import groups
from grids import some

from benchmarks.partition.cases import worst
from benchmarks.pipelines.runners import ZbppRunner
from benchmarks.training.model import Gpt
from megatron_zbpp import Layers
from megatron_zbpp.cli import main
from megatron_zbpp.ir.placement import layers_per_stage
from megatron_zbpp.runtime.clock import HostClock
from megatron_zbpp.schedules import build

pytestmark = pytest.mark.one_release

HEAD, SEQUENCE = 64, 128
OFF = 0.1  # that a stage may be, as a share of what it takes
ITERATIONS = 4
LLAMA = {'num_query_groups': 2, 'normalization': 'RMSNorm', 'add_bias_linear': False}
EXPERTS = {'num_moe_experts': 4, 'moe_router_topk': 2, 'moe_ffn_hidden_size': 1024}
# by model: fields of Megatron's config; flags of `zbpp profile`
MODELS = {
    'gpt': ({}, {}),
    'llama': (LLAMA | {'ffn_hidden_size': 1408}, {'groups': 2, 'ffn': 1408}),
    'moe': (LLAMA | EXPERTS, {'groups': 2, 'experts': 4, 'top-k': 2, 'expert-ffn': 1024}),
}


def measured(p, model, layers, hidden, words):
    """Seconds of F, B and W of this rank's stage, of one microbatch: medians. Seconds of this
    thread on a processor: what other programs take does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fields, found = dict(MODELS[model][0]), []
    if fields:
        fields |= {'gated_linear_unit': True, 'activation_func': torch.nn.functional.silu}
    on_processor = mock.patch.object(HostClock, 'mark', lambda self: time.thread_time())
    try:
        with groups(pp=p):
            model = Gpt(layers, hidden, HEAD, SEQUENCE, words, rotary=bool(fields), **fields)
            # of one microbatch, so that ranks take turns
            runner = ZbppRunner(build('zb-h1', p, 1), 'zb-h1', model, optimizer=False)
            with runner.ready(), on_processor:
                for number in range(1 + ITERATIONS):
                    runner.iterate()
                    spans = runner.plugin.latest.spans()
                    if number:
                        found.append([end - start for start, end in spans])
        return sum(median(times) for times in zip(*found, strict=True))
    finally:
        torch.set_num_threads(threads)


def by_shape(folder, p, model, layers, hidden, words):
    """Seconds of each stage as `zbpp profile` has them, of a device of 1 TFLOP/s."""
    file = folder / f'{words}.json'
    sizes = {'layers': layers, 'hidden': hidden, 'heads': hidden // HEAD, 'vocab': words}
    sizes |= {'seq': SEQUENCE, 'tflops': 1} | MODELS[model][1]
    flags = [word for name, size in sizes.items() for word in (f'--{name}', str(size))]
    assert main(['profile', '--model', model, *flags, '-o', str(file)]) == 0
    cuts = layers_per_stage(layers, build('zb-h1', p, 1).placement)
    cuts = [cuts[0] + 1, *cuts[1:-1], cuts[-1] + 1]
    known = Layers.from_json(file.read_text())
    return [sum(layer.time for layer in own) for own in known.stages(cuts)]


def off(times, known):
    """By how much a stage is off, at the rate that a shape does not tell."""
    rate = sum(known) / sum(times)
    return worst(times, [each / rate for each in known])


@some(
    'model, p, layers, hidden, words',
    [('gpt', 2, 4, 512, 8000)],
    *[('gpt', 4, 8, 512, 16000), ('llama', 2, 4, 512, 8000), ('moe', 2, 4, 512, 8000)],
)
def test_within_a_tenth(ranks, tmp_path, model, p, layers, hidden, words):
    """Of each stage, at one rate for all; measured again where the machine was disturbed."""
    known = by_shape(tmp_path, p, model, layers, hidden, words)
    headless = by_shape(tmp_path, p, model, layers, hidden, 64)
    found = []
    for _ in range(12):
        times = ranks(p).run(measured, p, model, layers, hidden, words)
        found.append(off(times, known))
        if found[-1] <= OFF:
            assert off(times, headless) > OFF, 'it tells whether the head is counted'
            return
    raise AssertionError(found)
