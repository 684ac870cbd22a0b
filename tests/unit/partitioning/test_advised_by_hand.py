"""What advice predicts, worked out by hand: each term of time and memory by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_zbpp.analysis.simulator import simulate
from megatron_zbpp.ir import Placement
from megatron_zbpp.partitioning.advise.job import FULL, NONE, SELECTIVE, Job, Setup
from megatron_zbpp.partitioning.advise.layer_costs import layer_costs
from megatron_zbpp.partitioning.advise.prediction import predict, stages_of
from megatron_zbpp.partitioning.advise.search import advise, flags_of, setups_of, with_measured
from megatron_zbpp.partitioning.layers import Layer
from megatron_zbpp.partitioning.shapes import Shape, layers_of
from megatron_zbpp.schedules import build

H = SEQ = 2048
SBH = SEQ * H
FLOPS, BYTES, NODE, NET = 245e12, 2039e9, 300e9, 25e9  # a second
SMALL = Shape('gpt', 8, H, 16, 51200, SEQ, 245.0, bandwidth=2039.0)
QUICK = replace(SMALL, bandwidth=0.0)  # of memory
MOE = Shape('moe', 8, H, 16, 51200, SEQ, 245.0, groups=8, experts=8, expert_ffn=1024)
WEIGHTS = 8 * 12 * H**2 + 2 * 51200 * H


def job(shape: Shape = QUICK, **others: object) -> Job:
    return Job(shape, 32, 8, 40 * 2.0**30, **others)  # type: ignore[arg-type]


def layer(made: Job, setup: Setup, at: int = 1) -> Layer:
    return layer_costs(made, setup).layers.layers[at]


# Behind the last pass


@pytest.mark.parametrize(
    ('changes', 'moved', 'step'),
    [
        ({}, 6, 30 / 8),
        ({'shards_optimizer': False}, 8, 30),  # gradients go around twice, no parameters
    ],
)
def test_a_step_moves_thirty_bytes_a_parameter(
    changes: dict[str, object], moved: int, step: float
) -> None:
    rest = stages_of(job(SMALL, **changes), Setup()).rest
    reduced = moved * WEIGHTS * 7 / 8 / NODE
    assert rest == pytest.approx(reduced + step * WEIGHTS / BYTES)


@pytest.mark.parametrize(('tp', 'near'), [(1, 4), (2, 2)])
def test_replicas_of_a_node_share_its_links_to_others(tp: int, near: int) -> None:
    dp, shard = 8 // tp, WEIGHTS / tp
    rest = stages_of(job(gpus_per_node=4), Setup(tp)).rest
    assert rest == pytest.approx(6 * shard * (dp - 1) / dp / (near * NET))


def test_reduction_hides_behind_the_last_backward_of_the_shortest_stage() -> None:
    slow = job(within=30.0)
    behind, beside = (stages_of(replace(slow, overlaps=each), Setup(1, 2)) for each in (0, 1))
    times = beside.costs.times
    last = [b + w for b, w in zip(times['B'], times['W'], strict=True)]
    assert last[0] < last[1] < behind.rest, 'the loss is on the second'
    assert beside.rest == pytest.approx(behind.rest - last[0])


# Memory


@pytest.mark.parametrize('saving', [NONE, SELECTIVE, FULL])
def test_bytes_of_each_rank(saving: str) -> None:
    """1F1B holds two microbatches on the first of two ranks, one on the other."""
    setup = Setup(1, 2, layers=(3, 5), saving=saving)
    made = layer_costs(job(SMALL), setup)
    first, second = made.layers.layers[:4], made.layers.layers[4:]
    assert (made.transient > 0) == (saving != NONE)
    for rank, (stage, count) in enumerate(((first, 2), (second, 1))):
        wanted = made.transient + sum(each.parameters + count * each.activation for each in stage)
        found = predict(job(SMALL), setup)
        assert found.nbytes[rank] == pytest.approx(wanted)
        assert found.counts == (4, 6)


def test_equally_fast_setups_come_with_the_least_memory_first() -> None:
    made = Job(QUICK, 2, 2, 80 * 2.0**30)
    best = advise(made, ('gpipe', '1f1b'), count=99).best
    equal = [pair for pair in itertools.pairwise(best) if pair[0].seconds == pair[1].seconds]
    held = [(max(a.nbytes), max(b.nbytes)) for a, b in equal]
    assert all(a <= b for a, b in held) and any(a < b for a, b in held)


def test_many_microbatches_follow_from_few() -> None:
    """Each p more take as long as the last p did: those of all are not simulated."""
    made, setup = Job(QUICK, 250, 4, 80 * 2.0**30), Setup(1, 4)
    stages = stages_of(made, setup)
    whole = simulate(build('1f1b', 4, 250), stages.costs).makespan
    assert predict(made, setup).seconds == pytest.approx(whole + stages.rest)


# Context parallelism, and expert tensor parallelism


def test_context_parallel_ranks_share_the_tokens() -> None:
    one, two = (layer(job(SMALL, cp=cp, fused=False), Setup()) for cp in (1, 2))
    for name in ('forward', 'backward', 'weight', 'activation', 'retained', 'output'):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2), name
    assert one.activation == 34 * SBH + 5 * 16 * SEQ**2
    assert job(cp=2).shape_of(Setup()).dp == 8, 'they share the optimizer, too'


@pytest.mark.parametrize('shared', [True, False])
def test_messages_are_of_the_tokens_of_a_rank(shared: bool) -> None:
    output = 2 * SBH / (4 if shared else 1)
    assert layer(job(), Setup(4, sequence_parallel=shared)).output == output


def test_ranks_of_an_expert_gather_its_tokens() -> None:
    """Of two ranks each: half goes to other experts, and all to the other rank, in and out."""
    quick = job(MOE, within=1e9)
    talk = layer(job(MOE), Setup(2, ep=2)).forward - layer(quick, Setup(2, ep=2)).forward
    collectives = 2 * 2 * SBH / 2 / NODE
    own = 2 * (SEQ / 2) * 2 * H
    assert talk == pytest.approx(collectives + 2 * (own / 2 + own) / NODE, rel=1e-4)


def test_rows_that_tensor_parallel_ranks_do_not_divide() -> None:
    """s·b·h·(10 + 24/t) bytes without sequence parallelism, of which 8 wait for W undivided."""
    for tp in (2, 4):
        made = layer(job(SMALL), Setup(tp, sequence_parallel=False))
        whole = layer(job(SMALL), Setup(tp, sequence_parallel=True))
        assert made.activation == pytest.approx(SBH * (10 + 24 / tp))
        assert whole.activation == pytest.approx(SBH * 34 / tp)
        assert made.retained is not None and whole.retained is not None
        assert made.retained - whole.retained == pytest.approx(8 * SBH * (1 - 1 / tp))


@pytest.mark.parametrize(('node', 'slow'), [(8, {3}), (4, {1, 3, 5}), (16, set())])
def test_stages_send_over_the_links_of_their_nodes(node: int, slow: set[int]) -> None:
    """Of 16 GPUs two are a pipeline rank: four ranks of a node of eight."""
    made = stages_of(Job(QUICK, 32, 16, 40 * 2.0**30, gpus_per_node=node), Setup(2, 8))
    times = [SBH / (NET if k in slow else NODE) for k in range(7)]  # half of 2·s·b·h bytes
    assert made.costs.hops == tuple((pytest.approx(time),) * 2 for time in times)


def test_an_expert_of_one_rank_is_whole_there() -> None:
    """Four experts on each: of two tensor ranks an expert has both, or one and more replicas."""
    own = 4 * 3 * H * 1024
    whole, halves = (layer(job(MOE, etp=etp), Setup(2, ep=2)).parameters for etp in (1, 2))
    assert whole - halves == pytest.approx(own * (6 + 12 / 4) - own / 2 * (6 + 12 / 2))


# Times of layers


def test_the_embedding_and_the_loss_talk() -> None:
    """A gathering in F of both, and of the loss in B."""
    talk = 2 * SBH * 3 / 4 / NODE
    made, plain = layer_costs(job(), Setup(4)).layers.layers, layers_of(replace(QUICK, tp=4)).layers
    for at, backward in ((0, 0.0), (-1, talk)):
        assert made[at].forward == pytest.approx(plain[at].forward + talk)
        assert made[at].backward == pytest.approx(plain[at].backward + backward)


def test_scores_are_computed_above_the_diagonal_too() -> None:
    """As much again as below it: 2·s²·h a sample; and they are written and read."""
    plain, scored = (layer(job(SMALL, fused=each), Setup()) for each in (True, False))
    more = 2 * SEQ**2 * H / FLOPS + 2 * 5 * 16 * SEQ**2 / BYTES
    assert scored.forward - plain.forward == pytest.approx(more)
    assert scored.backward - plain.backward == pytest.approx(2 * more)
    again = layer(job(SMALL, fused=False), Setup(saving=SELECTIVE))
    whole = 4 * SEQ**2 * H / FLOPS + 2 * 5 * 16 * SEQ**2 / BYTES
    assert again.backward - scored.backward == pytest.approx(whole)


def test_an_mlp_that_runs_again_talks_again() -> None:
    """It gathers and scatters once more: 2·2·s·b·h·1/2 bytes of two ranks."""
    added = [
        layer(made, Setup(2, saving=SELECTIVE)).backward - layer(made, Setup(2)).backward
        for made in (job(), job(within=1e9))
    ]
    assert added[0] - added[1] == pytest.approx(2 * 2 * SBH / 2 / NODE, rel=1e-3)
    assert added[1] == pytest.approx(16 * SBH * H / 2 / FLOPS, rel=1e-3), 'both products'


def test_shared_experts_run_again_beside_the_others() -> None:
    """A token takes two experts, and a shared one of the same size."""
    two, three = (
        layer(job(shape), Setup(saving=SELECTIVE)).backward - layer(job(shape), Setup()).backward
        for shape in (MOE, replace(MOE, shared_ffn=1024))
    )
    assert three == pytest.approx(1.5 * two) and two > 0


def test_each_kind_of_pass_is_measured_by_itself() -> None:
    own = Setup(1, 2)
    before = [sum(stages_of(job(), own).costs.times[kind]) for kind in 'FBW']
    wanted = [2 * before[0], 3 * before[1], 5 * before[2]]
    made = with_measured(job(), (wanted[0], wanted[1], wanted[2]), own)
    after = [sum(stages_of(made, own).costs.times[kind]) for kind in 'FBW']
    assert after == pytest.approx(wanted)


def test_copies_to_the_host_take_its_own_links() -> None:
    setup = Setup(1, 4, 2, schedule='po-h')
    slow, fast = (max(predict(job(host=rate), setup).nbytes) for rate in (1.0, 1000.0))
    assert slow > 1.1 * fast, 'what has no time to go stays'
    plain = replace(setup, schedule='zb-v')
    assert predict(job(host=1.0), plain) == predict(job(host=1000.0), plain)


# Sizes


def test_a_whole_node_is_within_it() -> None:
    assert [job().rate(ranks) for ranks in (8, 9)] == [NODE, NET]


def test_layers_of_further_tokens_are_on_the_last_stage() -> None:
    assert job(replace(QUICK, mtp=2)).counts(Setup(1, 2), Placement.loop(2)) == (5, 7)


@pytest.mark.parametrize('odd', [{'seq': SEQ + 2}, {'ffn': 4 * H + 2}, {'heads': 2}])
def test_tensor_parallel_ranks_divide(odd: dict[str, int]) -> None:
    """Sequences, the MLP and heads: two ranks do, four and eight do not."""
    assert {setup.tp for setup in setups_of(job(replace(QUICK, **odd)), ('1f1b',))} == {1, 2}


FLAGS: dict[str, tuple[Callable[[Setup], Setup], str]] = {
    'sequences': (lambda s: replace(s, sequence_parallel=False), '--sequence-parallel'),
    'one tensor rank': (lambda s: replace(s, tp=1), '--sequence-parallel'),
    'stock': (lambda s: replace(s, schedule='1f1b', chunks=1), '--pipeline-schedule zb-v'),
    'nothing again': (
        lambda s: replace(s, saving=NONE),
        '--recompute-granularity full --recompute-method uniform --recompute-num-layers 1',
    ),
}


@pytest.mark.parametrize('name', FLAGS)
def test_a_flag_that_a_setup_has_no_use_for_is_left_out(name: str) -> None:
    change, flag = FLAGS[name]
    whole = Setup(2, 4, 2, 1, 1, 'zb-v', FULL)
    with_it, without = (' '.join(flags_of(job(), each)) for each in (whole, change(whole)))
    assert flag in with_it and flag not in without
