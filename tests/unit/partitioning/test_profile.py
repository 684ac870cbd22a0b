"""Costs of layers: from shapes, against counts by hand; and from times of stages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from instances import P1

from megatron_zbpp import Devices, Layers, Placement
from megatron_zbpp.analysis.least_squares import non_negative
from megatron_zbpp.cli import main
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.partitioning.fitting import fit_layers, measured_devices
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.partitioning.space import Partition, stage_costs

GPT3 = Shape('gpt', 2, hidden=64, heads=4, vocab=1000, seq=32, tflops=1e-12)  # one FLOP a second


def layer(shape: Shape, kind: str = 't'):
    return next(x for x in layers_of(shape) if x.kind == kind)


def test_gpt():
    """12 h^2 parameters; attention beside them; 34 t h bytes, of which 32 t h wait for W."""
    h, s = 64, 32
    own = layer(GPT3)
    assert own.weight == 2 * s * 12 * h * h
    assert own.forward == own.weight + 2 * s * s * h
    assert own.backward == own.weight + 4 * s * s * h
    assert (own.activation, own.retained) == (34 * s * h, 32 * s * h)
    assert own.parameters == 12 * h * h * 18 and own.output == 2 * s * h


def test_ends():
    """The output layer counts as 2 V h over a layer's FLOPs; the embedding takes no time."""
    head, embedding = layer(GPT3, 'L'), layer(GPT3, 'E')
    assert head.forward == head.backward == head.weight == 2 * 32 * 64 * 1000
    assert head.activation == 32 * (4 * 1000 + 2 * 64)
    assert embedding.time == embedding.activation == 0
    assert embedding.parameters == head.parameters == 64 * 1000 * 18


def test_llama():
    """SwiGLU has three matrices, grouped queries few keys: 8B has 218 million a layer."""
    shape = Shape(
        'llama', 32, hidden=4096, heads=32, groups=8, ffn=14336, vocab=128256, seq=8192, tflops=1.0
    )
    each = layer(shape).parameters / 18
    assert each == 4096 * (4096 + 2048 + 4096 + 3 * 14336)
    assert 32 * each + 2 * 4096 * 128256 == pytest.approx(8.03e9, rel=0.01)


def test_mla_and_moe():
    """DeepSeek-V2-Lite: latent attention, then 64 experts of which a token takes 6."""
    common = {'hidden': 2048, 'heads': 16, 'vocab': 102400, 'seq': 4096, 'tflops': 1.0}
    latent = Shape('mla', 1, head_dim=128, kv_rank=512, rope_dim=64, v_dim=128, ffn=10944, **common)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert layer(latent).parameters / 18 == attention + 3 * 2048 * 10944
    some = {'experts': 64, 'top_k': 6, 'expert_ffn': 1408, 'shared_ffn': 2816, 'dense_first': 1}
    sparse = Shape('mla', 2, head_dim=128, v_dim=128, ffn=10944, **some, **common)
    dense, moe = (x for x in layers_of(sparse) if x.kind == 't')
    assert dense == layer(latent)
    expert = 3 * 2048 * 1408
    assert moe.parameters / 18 == attention + 64 * expert + 2 * expert + 2048 * 64
    token = moe.weight * 1e12 / (2 * 4096)
    assert token == pytest.approx(attention + 8 * expert + 2048 * 64)
    compressed = layer(Shape('mla', 1, q_rank=256, head_dim=128, ffn=10944, **common))
    assert compressed.parameters < layer(latent).parameters


def test_hybrid_and_multi_token_prediction():
    common = {'hidden': 64, 'heads': 4, 'vocab': 100, 'seq': 32, 'tflops': 1.0}
    found = layers_of(Shape('hybrid', 4, pattern='M-*E', experts=4, **common))
    assert found.text((3, 3)) == 'EM-|*EL'
    assert (
        layer(Shape('hybrid', 1, pattern='M', **common), 'M').parameters / 18
        == 64 * (2 * 128 + 2 * 128 + 2) + 128 * 64
    )
    latent = Shape('mla', 1, head_dim=16, **common)
    told = [*layers_of(Shape('hybrid', 3, pattern='*|+-/*-/*', head_dim=16, **common))]
    alone = [*layers_of(Shape('hybrid', 3, pattern='*+-', head_dim=16, **common))]
    assert ''.join(each.kind for each in told) == 'E*+-L'
    whole = layer(latent)
    assert told[2].weight + told[3].weight == pytest.approx(whole.weight)
    extra = alone[1].weight * 2 + alone[3].weight  # *- and *
    each = alone[-1].weight + 2 * 32 * 2 * 64 * 64 / 1e12  # an output layer, and what joins
    assert told[-1].weight == pytest.approx(alone[-1].weight + extra + 2 * each)
    ahead = layers_of(Shape('llama', 2, mtp=1, **common))
    own, head, mtp = (next(x for x in ahead if x.kind == kind) for kind in 'tLm')
    assert mtp.weight == pytest.approx(own.weight + head.weight + 2 * 32 * 2 * 64 * 64 / 1e12)


def test_bandwidth():
    """Bytes that passes move take time of their own, beside the products."""
    own, moved = layer(GPT3), layer(Shape(**asdict(GPT3) | {'bandwidth': 1e-9}))  # a byte a second
    weights, held = 12 * 64 * 64, 34 * 32 * 64
    assert moved.forward - own.forward == moved.backward - own.backward == 2 * held + 2 * weights
    assert moved.weight - own.weight == 32 * 32 * 64 + 8 * weights
    assert layer(Shape(**asdict(GPT3) | {'bandwidth': 1e-9}), 'E').time == 0


def test_parallel_ranks_share():
    one = layer(GPT3)
    two = layer(Shape(**asdict(GPT3) | {'tp': 2, 'dp': 4}))
    assert two.time == one.time / 2 and two.activation == one.activation / 2
    assert two.parameters == one.parameters / 2 * (6 + 3) / 18


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ({'model': 'rnn'}, "'rnn' is unknown"),
        ({'model': 'moe'}, '--experts'),
        ({'model': 'hybrid'}, "pattern ''"),
        ({'model': 'hybrid', 'pattern': 'ME'}, '--experts'),
        ({'model': 'hybrid', 'pattern': 'G-'}, "pattern 'G-': give a letter .*zbpp profile --st"),
        ({'model': 'hybrid', 'pattern': '*-/'}, "pattern '\\*-/'"),
        ({'tflops': 0}, 'tflops 0'),
        ({'layers': -1}, 'layers -1: give 1 or more'),
        ({'bandwidth': -1.0}, r'bandwidth -1\.0: give 0 or more'),
        ({'heads': 5}, 'heads 5 does not divide hidden 64'),
        ({'groups': 3}, 'groups 3 does not divide heads 4'),
        ({'tp': 8}, 'tp 8 does not divide heads 4'),
        ({'model': 'moe', 'experts': 4, 'ep': 3}, 'ep 3 does not divide experts 4'),
        ({'model': 'moe', 'experts': 4, 'top_k': 5}, 'top_k 5 of experts 4'),
        ({'model': 'moe', 'experts': 4, 'dense_first': 3}, 'dense_first 3 of layers 2'),
        ({'model': 'hybrid', 'pattern': 'M-*'}, "layers 2, but pattern 'M-\\*' has 3"),
    ],
)
def test_odd_shapes(change, said):
    with pytest.raises(ValueError, match=said):
        Shape(**asdict(GPT3) | change)


def measured(cuts: tuple[int, ...]):
    costs = stage_costs(
        P1, Devices.alike(len(cuts)), Partition(Placement.loop(len(cuts)), cuts, (0, 1, 2, 3))
    )
    return P1.text(cuts), costs


def test_layers_from_stages():
    """What stages of them take gives the layers back, from one layout or from several."""
    for given in ([measured((2, 2, 2, 2))], [measured((3, 2, 2, 1)), measured((1, 3, 2, 2))]):
        found, error = fit_layers(given)
        assert error < 1e-6
        for own, known in zip(found, P1, strict=True):
            assert own.kind == known.kind
            assert (own.forward, own.backward, own.weight) == pytest.approx(
                (known.forward, known.backward, known.weight), abs=1e-4
            )


def test_a_constant_of_each_stage():
    text, costs = measured((3, 2, 2, 1))
    more = type(costs).of(
        *(tuple(x + 0.5 for x in t) for t in (costs.times['F'], costs.times['B'], costs.times['W']))
    )
    found, error = fit_layers([(text, more), measured((3, 2, 2, 1))], constant=True)
    assert error < 0.1 and sum(x.time for x in found) == pytest.approx(50, rel=0.1)


def test_nothing_is_below_zero():
    assert non_negative([[1.0, 1.0], [0.0, 1.0]], [1.0, 2.0]) == pytest.approx([0.0, 1.5])


def test_parameters_of_layers():
    """Those of stages are theirs, too."""
    text, costs = measured((3, 2, 2, 1))
    held = replace(costs, parameters=(7.0, 4.0, 4.0, 5.0))
    found, _ = fit_layers([(text, held)])
    for cut, most in zip(found.stages((3, 2, 2, 1)), held.parameters, strict=True):
        assert sum(layer.parameters for layer in cut) == pytest.approx(most, abs=1e-4)


def test_devices_from_stages(tmp_path, capsys):
    """The rank that takes longer for its layers, and what a message takes; layers are usual."""
    times, layers, devices = (tmp_path / name for name in ('times.json', 'l.json', 'd.json'))
    each = [2, 2, 3, 4]
    hops = [[0.5, 1], [0, 0], [0, 0]]
    times.write_text(json.dumps({'F': each, 'B': each, 'W': each, 'comm': 0.25, 'hops': hops}))
    given = ['profile', '--stages', f'Ett|tt|tt|tL={times}', '-o', str(layers)]
    assert main([*given, '--write-devices', str(devices)]) == 0
    assert capsys.readouterr().out.endswith(f'wrote {layers}\nwrote {devices}\n')
    found = Devices.from_json(devices.read_text())
    assert [device.factors for device in found.devices] == [(x, x, x) for x in (1, 1, 1.5, 1)]
    links = [(0, 1), (1, 0), (1, 2), (3, 2), (1, 1)]
    assert [found.edge(*link, 0.0) for link in links] == [0.75, 1.25, 0.25, 0.25, 0]
    decoder = next(x for x in Layers.from_json(layers.read_text()) if x.kind == 't')
    assert decoder.forward == pytest.approx(1.0)
    two = [f'Ett|tt|tt|tL={times}'] * 2
    assert main(['profile', '--stages', *two, '--write-devices', str(devices)]) == 2
    assert 'give one --stages' in capsys.readouterr().err


def test_devices_of_ranks_with_several_stages(tmp_path, capsys):
    """Rank 2 of a V takes longer in both of its stages; two routes have no rank for a stage."""
    times, layers, devices = (tmp_path / name for name in ('times.json', 'l.json', 'd.json'))
    layout, each = 'Ett|tt|tt|tt|tt|tL', [2, 2, 3, 3, 2, 3]
    stages = {'layout': layout, 'F': each, 'B': each, 'W': each}
    given = ['profile', str(times), '-o', str(layers), '--write-devices', str(devices)]
    times.write_text(json.dumps({**stages, 'routes': [[0, 1, 2, 2, 1, 0]]}))
    assert main(given) == 0
    found = Devices.from_json(devices.read_text())
    assert [device.factors for device in found.devices] == [(x, x, x) for x in (1, 1, 1.5)]
    decoder = next(x for x in Layers.from_json(layers.read_text()) if x.kind == 't')
    assert decoder.forward == pytest.approx(1.0)
    one = [*given[:1], '--stages', f'{layout}={times}', *given[2:]]
    assert main(one) == 0 and Devices.from_json(devices.read_text()) == found
    capsys.readouterr()
    times.write_text(json.dumps({**stages, 'routes': [[*range(6)], [*range(6)][::-1]]}))
    assert main(given) == 2
    assert 'these stages ran on two ranks each' in capsys.readouterr().err
    times.write_text(json.dumps({**stages, 'routes': [[0, 1, 1]]}))
    assert main(given) == 2
    assert 'route [0, 1, 1] has 3 stages and F 6 entries: give one rank' in capsys.readouterr().err


def test_links_take_the_fastest_message_of_two_ranks():
    """What others take beyond it is of their stages."""
    costs = Costs.of(*[(1.0,) * 4] * 3, comm=0.25, hops=[(0.5, 1), (0, 0), (0.25, 2)])
    found = measured_devices(['t'] * 4, Placement.v(2), costs)
    assert (found.edge(0, 1, 0.0), found.edge(1, 0, 0.0)) == (0.25 + 0.5, 0.25 + 0.25)


def test_other_stages_are_refused():
    text, costs = measured((2, 2, 2, 2))
    with pytest.raises(ValueError, match='has 3 stages, its times 4'):
        fit_layers([('Ett|tt|ttL', costs)])
    with pytest.raises(ValueError, match='has other layers than'):
        fit_layers([(text, costs), ('Et|tt|t|tL', costs)])


def test_command(tmp_path, capsys):
    file, times = tmp_path / 'layers.json', tmp_path / 'times.json'
    shape = '--num-layers 4 --hidden 64 --heads 4 --vocab 1000 --seq 32 --tflops 1'.split()
    assert main(['profile', '--model', 'gpt', *shape, '-o', str(file)]) == 0
    assert 'wrote' in capsys.readouterr().out
    assert Layers.from_json(file.read_text()).text((3, 3)) == 'Ett|ttL'
    times.write_text('{"F": [3, 4], "B": [2, 4], "W": [2, 4]}')
    fast = tmp_path / 'fast.json'
    fast.write_text('{"F": [3, 4], "B": [2, 4], "W": [2, 4], "speeds": [1, 2]}')
    given = ['profile', '--stages', f'Et|tL={times}', '--json', '-o', str(file)]
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)['layout'] == 'EttL'
    hybrid = '--hidden 64 --heads 4 --vocab 1000 --seq 32 --tflops 1 --pattern M-M*'.split()
    assert main(['profile', '--model', 'hybrid', *hybrid]) == 0
    assert main(['profile', '--model', 'hybrid', *hybrid[:-1], 'M-|M*/*-', '--json']) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])['layers'] == 6
    for bad, said in (
        ([], 'give --model'),
        (['--model', 'gpt'], '--model gpt needs --num-layers'),
        (['--stages', 'Et|tL'], 'give LAYOUT=FILE'),
        (['--stages', f'EttL={file}'], 'layers.json'),
        (['--stages', f'Ex|yL={times}'], "layout 'Ex|yL' has xy for layers: give such as Ett|ttL"),
        (['--stages', f'|={times}'], "layout '|' has nothing for layers: give such as Ett|ttL"),
        (['--stages', f'EttL={file}'], 'give times of the stages as {"F"'),
        (['--stages', f'Et|tL={tmp_path / "none"}'], 'No such file or directory: give a file of'),
        (['--stages', f'Et|tL={times}', '--hidden', '4'], '--hidden is about --model'),
        (['--model', 'gpt', *shape, '--constant'], '--constant is about --stages'),
        (['--model', 'gpt', *shape, '--write-devices', 'd'], '--write-devices is about --stages'),
        (['--model', 'mla', *shape, '--groups', '2'], '--groups is about --model gpt or llama'),
        (['--model', 'gpt', *shape, '--ep', '2'], '--ep is about --model moe or mla or hybrid'),
        (['--stages', f'Et|tL={fast}'], 'speeds say nothing of layers'),
        (['--model', 'gpt', *shape, '--pattern', 'M'], '--pattern is about --model hybrid, not'),
        (['--model', 'gpt', *shape, '--kv-rank', '8'], '--kv-rank is about --model mla or hybrid'),
    ):
        assert main(['profile', *bad]) == 2
        assert said in capsys.readouterr().err
