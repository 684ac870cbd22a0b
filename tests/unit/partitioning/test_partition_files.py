"""Files of layers and devices: read as they are meant, or refused."""

from __future__ import annotations

import pytest
from instances import INSTANCES, NODES, ONE_SLOW

from megatron_zbpp import Devices, Layer, Layers
from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.space import Partition, stage_costs

HEAD = '{"format": "megatron_zbpp.layers/1", "layers": '


@pytest.mark.parametrize('name', INSTANCES)
def test_layers_come_back(name):
    own = INSTANCES[name].layers
    assert Layers.from_json(own.to_json()) == own


def test_a_layer_of_which_nothing_is_said_takes_no_time():
    read = Layers.from_json(HEAD + '[{"kind": "t"}]}').layers
    assert read == (Layer('t', 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0),)


@pytest.mark.parametrize('devices', [NODES, ONE_SLOW, Devices.alike(3)])
def test_devices_come_back(devices):
    assert Devices.from_json(devices.to_json()) == devices


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('{}', "field 'format' is missing"),
        (HEAD.replace('/1', '/2') + '[{"kind": "t"}]}', 'is not one of'),
        (HEAD + '[]}', 'is not a list of layers'),
        (HEAD + '[{"F": 1}]}', "field 'kind' is missing"),
        (HEAD + '[{"kind": "t", "f": 1}]}', "'f' is not known"),
        (HEAD + '[{"kind": "t", "F": -1}]}', 'forward = -1'),
        (HEAD + '[{"kind": "t", "count": 0}]}', "'count': 0"),
        (HEAD + '[{"kind": "t", "count": 1000000000000}]}', 'give 1 or more, to 100000'),
        (HEAD + '[{"kind": "tt"}]}', "'tt' is not a letter"),
        (HEAD + '[{"kind": "t"}, {"kind": "E"}]}', 'give one E, as the first'),
        (HEAD + '[{"kind": "L"}, {"kind": "t"}]}', 'give one L, as the last'),
        (HEAD + '[{"kind": "m"}, {"kind": "t"}]}', 'all m after the last t'),
        (HEAD + '[{"kind": "t"}], "model": 1}', "'model' is not known"),
    ],
)
def test_odd_layers(text, said):
    with pytest.raises(ValueError, match=said):
        Layers.from_json(text)


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('{}', "'devices' is missing"),
        ('{"devices": []}', 'is not a list of devices'),
        ('{"devices": [{"factor": {"X": 1}}]}', "'X' is not known"),
        ('{"devices": [{"factor": {"F": 0}}]}', 'factor 0'),
        ('{"devices": [{"speed": 1}]}', "'speed' is not known"),
        ('{"devices": [{"memory": 0}]}', 'memory 0'),
        ('{"devices": [{}], "latency": [[0, 1]]}', 'latency is not 1 rows of 1'),
        ('{"devices": [{}], "latency": [["a"]]}', 'rows of numbers'),
        ('{"devices": [{}], "bandwidth": [[-1]]}', 'bandwidth has -1'),
    ],
)
def test_odd_devices(text, said):
    with pytest.raises(ValueError, match=said):
        Devices.from_json(text)


def test_costs_of_stages():
    """Sums of layers, by factor of their device; an edge is latency and output over bandwidth."""
    layers = Layers(
        (
            Layer('E', 1, 0, 1, activation=2, output=6),
            Layer('t', 2, 3, 4, retained=0.5, output=8),
            Layer('L', 5, 6, 7),
        )
    )
    devices = Devices.from_json(
        '{"devices": [{"factor": {"F": 2, "W": 3}}, {}], "latency": [[0, 1], [2, 0]], '
        '"bandwidth": [[0, 4], [0, 0]]}'
    )
    costs = stage_costs(layers, devices, Partition(Placement.loop(2), (2, 1), (1, 0)))
    assert (costs.times['F'], costs.times['B'], costs.times['W']) == ((3, 10), (3, 6), (5, 21))
    assert (costs.amounts['activation'], costs.amounts['retained']) == ((3, 1), (2.5, 1))
    assert costs.edge(0, 1, (0, 1)) == 2 and costs.edge(1, 0, (1, 0)) == 1 + 8 / 4
    assert costs.hops == ((0, 8 / 4),)
    plain = Devices.from_json('{"devices": [{}, {}], "latency": [[0, 1], [2, 0]]}')
    assert not stage_costs(layers, plain, Partition(Placement.loop(2), (2, 1), (1, 0))).hops
