"""What `auto` says of other partitions, and the file that it leaves."""

import re
import sys

import pytest
from figures import layers_of_ranks

from megatron_zbpp import Costs, build, simulate
from megatron_zbpp.guests import auto_plan, background_search
from megatron_zbpp.guests.auto_plan import AutoPlan, Repartition, fit_layers_to_run
from megatron_zbpp.guests.base import ModelLayers
from megatron_zbpp.guests.measurements import Measured

SCHEDULE = build('zb-h1', 4, 8)
EVEN = 'Ett|tt|tt|ttL'
SLOW = Costs.of(*[(0.003, 0.002, 0.003, 0.004)] * 3, 0.0001)  # the third rank, and the head
HEAVY = Costs.of(*[(0.002, 0.002, 0.002, 0.005)] * 3, 0.0001)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))


def test_what_is_known_of_the_layers():
    """The head takes what its stage takes more; and the simulated iteration is the measured one."""
    found = fit_layers_to_run(EVEN, SCHEDULE, HEAVY, 'makespan')
    head, layer = found.layers.layers[-1], found.layers.layers[1]
    assert head.forward == pytest.approx(0.003, rel=1e-3)
    assert layer.forward == pytest.approx(0.001, rel=1e-3)
    assert found.error < 1e-3
    assert found.now == pytest.approx(simulate(SCHEDULE, HEAVY).makespan, rel=1e-3)
    assert fit_layers_to_run(EVEN, SCHEDULE, HEAVY, 'window').now < found.now


def test_a_slower_rank_is_told_from_heavier_layers():
    """The same layers take 1.5 times as long there; embedding and head are no slow machines."""
    found = fit_layers_to_run(EVEN, SCHEDULE, SLOW, 'makespan')
    assert [device.factors[0] for device in found.devices.devices] == pytest.approx([1, 1, 1.5, 1])
    embedding, layer, *_, head = found.layers
    assert (embedding.forward, layer.forward, head.forward) == pytest.approx(
        (0.001, 0.001, 0.002), rel=1e-3
    )
    assert found.error < 1e-3 and found.unequal == 'rank 2 takes 1.5 times as long'
    assert found.now == pytest.approx(simulate(SCHEDULE, SLOW).makespan, rel=1e-3)
    unlike = fit_layers_to_run(EVEN, SCHEDULE, SLOW, 'makespan', layers_alike=False)
    assert not unlike.unequal and unlike.error > 0.05


def test_a_slower_rank_gets_fewer_layers(monkeypatch):
    """On whatever placement: there it has the fewest, or as few as who has a heavy end."""
    layout = 'Etttt|tttt|tttt|ttttL'
    times = (0.004, 0.004, 0.012, 0.005)
    (said,) = settled(monkeypatch, Costs.of(*[times] * 3, 0.0001), layout=layout)
    assert 'rank 2 takes 3 times as long for its layers' in said
    held = layers_of_ranks(said.rpartition(' ')[2])
    assert sum(held) == 16 and held[2] == min(held) < 4 and max(held) > 4


def settled(monkeypatch, costs, schedule=SCHEDULE, layout=EVEN, **changes):
    """What is said until nothing more is waited for."""

    monkeypatch.setattr(auto_plan.dist, 'get_rank', lambda *_: 0)
    monkeypatch.setattr(background_search, '_LATE', 200)  # this machine may be busy
    said = []
    found = [Measured(costs, 1.0, {}, None, 0)]
    auto = AutoPlan(
        say=said.append,
        seconds=1.0,
        layers=ModelLayers(layout, alike=True),
        costs=costs,
        _found=found,
        _num_microbatches=8,
    )
    for name, value in changes.items():
        setattr(auto, name, value)
    auto._settle(schedule)
    if auto._partition is not None:
        auto._partition.search._process.wait()
        assert auto.after(type('Iteration', (), {'schedule': schedule}), None) is None
        assert auto._partition is None, 'asked once'
    return said


def test_a_limit_of_the_user_is_kept(monkeypatch):
    (said,) = settled(monkeypatch, HEAVY, memory_limit=4.0)
    assert float(re.search(r'it holds ([\d.]+) activations', said)[1]) <= 4


def test_nothing_to_gain(monkeypatch, tmp_path):
    two = build('zb-h1', 2, 8)
    (said,) = settled(monkeypatch, Costs.of(*[(0.002,) * 2] * 3), two, layout='Et|tL')
    assert said.startswith('auto: no other partition of the layers gains 1%')
    assert not [*tmp_path.iterdir()]


def test_nothing_is_looked_for_without_a_layout(monkeypatch):
    assert settled(monkeypatch, HEAVY, layout=None) == []


def test_a_search_that_fails(monkeypatch):
    command = sys.executable, '-c', 'import sys; sys.exit(3)'
    monkeypatch.setattr(background_search, 'COMMAND', command)
    said = []
    measured_run = fit_layers_to_run(EVEN, SCHEDULE, HEAVY, 'makespan')
    search = Repartition.start(measured_run, 8, None, 30, 'makespan', said.append)
    while not search.finished():
        pass
    assert said[-1] == 'auto: no other partition of the layers was found, see above'


def test_a_plan_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / 'megatron_zbpp').write_text('a file')
    (said,) = settled(monkeypatch, HEAVY)
    assert 'its plan could not be written' in said


def test_who_has_no_cache_folder_finds_it_here(monkeypatch, tmp_path):
    monkeypatch.setattr(auto_plan, 'default_folder', lambda: None)
    monkeypatch.chdir(tmp_path)
    (said,) = settled(monkeypatch, HEAVY)
    assert [str(path) for path in tmp_path.iterdir()] == [said.rpartition(' ')[2]]
