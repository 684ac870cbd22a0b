"""Advice on sizes, schedule and recomputation: what holds of every setup that is proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.advise import prediction
from megatron_zbpp.partitioning.advise.job import FULL, NONE, SELECTIVE, STOCK, Job, Setup
from megatron_zbpp.partitioning.advise.layer_costs import layer_costs
from megatron_zbpp.partitioning.advise.prediction import predict, stages_of
from megatron_zbpp.partitioning.advise.search import (
    advise,
    flags_of,
    processes,
    setups_of,
    with_measured,
)
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.schedules import build

GIB = 2.0**30
SMALL = Shape('gpt', 8, 2048, 16, 51200, 2048, 245.0, bandwidth=2039.0)
MOE = Shape(
    'moe', 8, 2048, 16, 51200, 2048, 245.0, groups=8, experts=8, expert_ffn=1024, dense_first=2
)
FEW = ('1f1b', 'interleaved', 'zb-h1', 'zb-v', 'v-half')
SOME = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def job(shape: Shape = SMALL, memory: float = 40 * GIB, **others: object) -> Job:
    return Job(shape, 32, 8, memory, **others)  # type: ignore[arg-type]


def possible(made: Job, names: Sequence[str] = FEW) -> list[Setup]:
    """Setups whose layers and microbatches divide, too."""
    found: list[Setup] = []
    for setup in setups_of(made, names):
        try:
            predict(made, setup)
        except ValueError:
            continue
        found.append(setup)
    return found


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    shape = draw(st.sampled_from((SMALL, replace(MOE, layers=4), replace(SMALL, layers=6))))
    return Job(
        shape,
        draw(st.sampled_from((8, 24, 32))),
        draw(st.sampled_from((2, 4, 6, 8))),
        draw(st.floats(8, 60)) * GIB,
        gpus_per_node=draw(st.sampled_from((2, 4, 8))),
        fused=draw(st.booleans()),
        shards_optimizer=draw(st.booleans()),
    )


@SOME
@given(jobs())
def test_every_proposal_fits_and_divides(made: Job) -> None:
    advice = advise(made, FEW)
    assert bool(advice.best) == (advice.least is None)
    for each in advice.best:
        setup, shape = each.setup, made.shape
        dp = made.replicas(setup)
        assert max(each.nbytes) <= made.room and len(each.nbytes) == setup.pp
        assert setup.tp * setup.pp * dp == made.gpus and setup.tp <= made.gpus_per_node
        assert each.microbatches * setup.micro_batch * dp == made.global_batch
        assert not shape.layers % (setup.pp * setup.chunks)
        assert not shape.heads % setup.tp and not (shape.groups or setup.tp) % setup.tp
        assert not shape.experts % setup.ep and not dp * setup.tp % (setup.ep * setup.tp)
        assert sum(each.counts) == shape.layers + 2
        assert 0 <= each.idle < 1
    assert list(advice.best) == sorted(advice.best, key=lambda each: each.seconds)
    assert len({each.setup for each in advice.best}) == len(advice.best)


@SOME
@given(jobs(), st.floats(1, 2))
def test_more_memory_is_never_slower(made: Job, more: float) -> None:
    less = advise(made, FEW, count=1).best
    richer = advise(replace(made, memory=made.memory * more), FEW, count=1).best
    assert not less or richer[0].seconds <= less[0].seconds


@SOME
@given(jobs(), st.integers(0, 10**6))
def test_never_slower_than_the_launch_line(made: Job, at: int) -> None:
    """Where that fits: also a setup that the search would not try."""
    found = possible(made)
    assume(found)
    own = replace(found[at % len(found)], sequence_parallel=False)
    kept = predict(made, own)
    advice = advise(made, FEW, own, count=1)
    assert advice.own == kept
    if max(kept.nbytes) <= made.room:
        assert advice.best[0].seconds <= kept.seconds


@SOME
@given(jobs())
def test_the_search_misses_nothing(made: Job) -> None:
    """It is held against simulation of all setups, which it leaves out by their bounds."""
    names = FEW[:-1]
    every = [predict(made, setup) for setup in possible(made, names)]
    assume(every)
    fitting = sorted(each.seconds for each in every if max(each.nbytes) <= made.room)
    advice = advise(made, names, count=5)
    assert [each.seconds for each in advice.best] == fitting[:5]
    if not fitting:
        assert advice.least is not None
        assert max(advice.least.nbytes) == min(max(each.nbytes) for each in every)


@SOME
@given(jobs(), st.integers(0, 10**6))
def test_bounds_are_below(made: Job, at: int) -> None:
    every = possible(made)
    assume(every)
    setup = every[at % len(every)]
    stages, found = stages_of(made, setup), predict(made, setup)
    assert stages.bound(found.microbatches) <= found.seconds * (1 + 1e-9)
    assert stages.least <= max(found.nbytes) * (1 + 1e-9)


def test_a_schedule_that_spares_memory_is_weighed_where_the_other_does_not_fit() -> None:
    setup = Setup(1, 8, 2, 1, 1, 'zb-v', NONE)
    need = max(predict(job(replace(SMALL, layers=16)), setup).nbytes)
    less = max(predict(job(replace(SMALL, layers=16)), replace(setup, schedule='v-half')).nbytes)
    assert less < need
    names = {
        each.setup.schedule
        for memory in (need, (need + less) / 2)
        for each in advise(
            job(replace(SMALL, layers=16), memory, reserve=0.0), ('zb-v', 'v-half'), count=99
        ).best
        if each.setup.pp == 8 and each.setup.saving == NONE and each.setup.micro_batch == 1
    }
    assert names == {'zb-v', 'v-half'}
    roomy = advise(job(replace(SMALL, layers=16), 800 * GIB), ('zb-v', 'v-half'), count=999)
    assert 'v-half' not in {each.setup.schedule for each in roomy.best}


@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h2', 'zb-v', 'v-half', 'po-h'])
@pytest.mark.parametrize('m', [64, 66])
def test_many_microbatches_are_as_if_simulated(name: str, m: int, monkeypatch) -> None:
    if name == 'interleaved' and m % 4:
        return  # Megatron's own wants a multiple
    setup = Setup(1, 4, 1 if name in ('1f1b', 'zb-h2') else 2, 1, 1, name)
    made = replace(job(), gpus=4, global_batch=m)
    short = predict(made, setup)
    monkeypatch.setattr(prediction, '_ROUNDS', 100)
    whole = predict(made, setup)
    assert short.seconds == pytest.approx(whole.seconds, rel=5e-3)
    assert short.nbytes == whole.nbytes and short.idle == pytest.approx(whole.idle, abs=5e-3)


def test_memory_that_grows_with_microbatches_is_of_all_of_them() -> None:
    made = replace(job(), gpus=4, global_batch=64)
    few = predict(replace(made, global_batch=8), Setup(1, 4, schedule='gpipe'))
    assert max(predict(made, Setup(1, 4, schedule='gpipe')).nbytes) > 4 * max(few.nbytes)


def test_layers_are_those_of_the_shape() -> None:
    """One rank of each kind: nothing is communicated, nothing runs again."""
    made = replace(job(), gpus=1)
    found = layer_costs(made, Setup(sequence_parallel=False))
    assert found == (layers_of(SMALL), 0.0)


def test_collectives() -> None:
    """Four of a dense layer's F and B move 3/4 of s·b·h of bf16, tp = 4."""
    layer = layers_of(replace(SMALL, tp=4)).layers[1]
    talk = 4 * 2 * 2048 * 2048 * 3 / 4 / 300e9
    made = layer_costs(job(), Setup(4)).layers.layers[1]
    assert made.forward == pytest.approx(layer.forward + talk)
    assert made.backward == pytest.approx(layer.backward + talk)
    assert made.weight == layer.weight
    slow = layer_costs(job(gpus_per_node=2), Setup(4)).layers.layers[1]
    assert slow.forward == pytest.approx(layer.forward + 12 * talk)


def test_without_sequence_parallelism_rows_are_undivided() -> None:
    """10·s·b·h of 34 (arXiv 2205.05198, equation 2)."""
    sbh = 2048 * 2048
    own, whole = (
        layer_costs(job(), Setup(4, sequence_parallel=each)).layers.layers[1].activation
        for each in (True, False)
    )
    assert own == 34 * sbh / 4 and whole == (10 + 24 / 4) * sbh


def test_scores_of_attention() -> None:
    """They are 5·a·s²·b bytes, which selective recomputation does without."""
    made = job(fused=False)
    kept, again = (
        layer_costs(made, Setup(2, saving=each)).layers.layers[1] for each in (NONE, SELECTIVE)
    )
    scores = 5 * 16 * 2048**2 / 2
    assert kept.activation == 34 * 2048 * 2048 / 2 + scores
    assert again.activation == kept.activation - scores
    assert again.backward > kept.backward and again.forward == kept.forward


def test_recomputation() -> None:
    """In full it keeps the input, 2·s·b·h, and B takes an F more; selective in between."""
    none, selective, full = (
        layer_costs(job(), Setup(2, saving=each)) for each in (NONE, SELECTIVE, FULL)
    )
    first = [each.layers.layers[1] for each in (none, selective, full)]
    assert first[2].activation == 2 * 2048 * 2048 / 2
    assert first[2].backward == pytest.approx(first[0].backward + first[0].forward)
    assert first[0].activation > first[1].activation > first[2].activation
    assert first[0].backward < first[1].backward < first[2].backward
    assert full.transient == first[0].activation - first[2].activation and not none.transient


def test_experts_are_shared_among_their_ranks() -> None:
    """Twice as many share them: half of the weights, and optimizer state as before."""
    one, two = (layer_costs(job(MOE), Setup(ep=ep)).layers.layers for ep in (1, 2))
    experts = 8 * 3 * 2048 * 1024
    assert one[5].parameters - two[5].parameters == pytest.approx(experts / 2 * 6)
    assert one[1].parameters == two[1].parameters, 'a dense layer has none'
    own = 2 * 2048 * 2 * 2048 * 1 / 2 / 300e9  # two experts a token, half elsewhere
    assert two[5].forward - one[5].forward == pytest.approx(2 * own)


def test_measured_layers() -> None:
    """The setup of the line takes what was measured, and all others in proportion."""
    own = Setup(1, 2)
    before = stages_of(job(), own).costs
    sums = [sum(before.times[kind]) for kind in 'FBW']
    made = with_measured(job(), (2 * sums[0], 3 * sums[1], sums[2]), own)
    after = stages_of(made, own).costs
    assert after.times['F'] == pytest.approx([2 * each for each in before.times['F']])
    assert after.times['B'] == pytest.approx([3 * each for each in before.times['B']])
    with pytest.raises(ValueError, match='give a file with all three'):
        with_measured(job(), (0.0, 1.0, 1.0), own)


def test_messages_within_a_node_and_between_nodes() -> None:
    """Pipeline ranks are outermost: four of two GPUs each are on two nodes of four."""
    made = job(gpus_per_node=4)
    costs = stages_of(made, Setup(1, 4)).costs
    edges = [costs.edge(rank, rank + 1, (rank, rank + 1)) for rank in range(3)]
    output = 2 * 2048 * 2048
    assert edges == [output / 300e9, output / 25e9, output / 300e9]


def test_gradients_are_reduced_behind_the_last_pass() -> None:
    """Six bytes of each parameter go to (dp-1)/dp of eight replicas; none where there is one."""
    alone = stages_of(replace(job(), gpus=2), Setup(1, 2))
    spread = stages_of(job(replace(SMALL, bandwidth=0.0)), Setup(1, 1))
    weights = 8 * 12 * 2048**2 + 2 * 51200 * 2048
    assert spread.rest == pytest.approx(6 * weights * 7 / 8 / 300e9)
    assert alone.rest < spread.rest
    hidden = stages_of(job(replace(SMALL, bandwidth=0.0), overlaps=True), Setup(1, 1))
    assert hidden.rest < spread.rest


@pytest.mark.parametrize(
    ('changed', 'told'),
    [
        ({'pp': 3}, '8 GPUs do not divide by tp 1 x cp 1 x pp 3'),
        ({'micro_batch': 3}, 'a batch of 32 does not divide by micro batch 3 x 8 data parallel'),
        ({'tp': 8, 'ep': 3}, '8 experts do not divide among ep 3'),
        ({'tp': 16}, '8 GPUs do not divide by tp 16 x cp 1 x pp 1'),
    ],
)
def test_what_does_not_divide(changed: dict[str, int], told: str) -> None:
    assert job(MOE).why_impossible(replace(Setup(), **changed)) == told
    with pytest.raises(ValueError, match=told):
        predict(job(MOE), replace(Setup(), **changed))


def test_nothing_divides() -> None:
    with pytest.raises(ValueError, match='do not divide into any setup: give --gpus'):
        advise(Job(SMALL, 3, 7, 40 * GIB), FEW)
    with pytest.raises(ValueError, match='leaves nothing: give more memory, or less reserve'):
        job(memory=GIB)


def test_flags() -> None:
    plain = '--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4'
    made = Setup(2, 4, 2, 1, 1, 'zb-v', FULL)
    assert (
        flags_of(job(), made)
        == (
            f'{plain} --micro-batch-size 1 --sequence-parallel --recompute-granularity full '
            '--recompute-method uniform --recompute-num-layers 1 --pipeline-schedule zb-v'
        ).split()
    )
    again = replace(made, schedule='interleaved', saving=SELECTIVE, tp=1)
    text = ' '.join(flags_of(job(MOE), again))
    assert '--expert-model-parallel-size 1 --micro-batch-size 1 --num-virtual-stages' in text
    assert text.endswith('-rank 2 --recompute-granularity selective --recompute-modules mlp moe')
    assert ' '.join(flags_of(job(fused=False), again)).endswith('--recompute-modules core_attn')
    four = replace(made, schedule='zb-interleaved', chunks=4, saving=NONE)
    assert '--num-virtual-stages-per-pipeline-rank 4' in ' '.join(flags_of(job(), four))
    assert build('zb-interleaved', 4, 8, num_chunks=4).placement == Placement.loop(4, 4)
    assert STOCK == ('1f1b', 'interleaved')


@pytest.mark.parametrize(
    ('words', 'gpus', 'made'),
    [
        ('torchrun --nproc-per-node 4', 4, 'torchrun --nproc-per-node 4'),
        ('/bin/torchrun --nnodes=2 --x', 16, '/bin/torchrun --nnodes 2 --nproc-per-node 8 --x'),
        ('torchrun --nproc_per_node 2 -m a', 8, 'torchrun --nproc-per-node 8 -m a'),
        ('srun python', 8, 'srun python'),
    ],
)
def test_processes(words: str, gpus: int, made: str) -> None:
    assert processes(words.split(), gpus, 8) == made.split()
