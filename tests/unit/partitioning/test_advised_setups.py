"""Advice on sizes, schedule and recomputation: what holds of every setup that is proposed."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_zbpp import Layer, Placement, build
from megatron_zbpp.partitioning import setup_prediction as prediction
from megatron_zbpp.partitioning.advice import advise, flags_of, processes, setups_of, with_measured
from megatron_zbpp.partitioning.setup_costs import (
    FULL,
    NONE,
    SELECTIVE,
    STOCK,
    Job,
    Setup,
    layer_costs,
)
from megatron_zbpp.partitioning.setup_prediction import predict, stages_of
from megatron_zbpp.partitioning.shapes import Shape, layers_of

GIB = 2.0**30
SMALL = Shape('gpt', 8, 2048, 16, 51200, 2048, 245.0, bandwidth=2039.0)
MOE = Shape(
    'moe', 8, 2048, 16, 51200, 2048, 245.0, groups=8, experts=8, expert_ffn=1024, dense_first=2
)
FEW = ('1f1b', 'interleaved', 'zb-h1', 'zb-v', 'v-half')
SOME = settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))


def job(shape: Shape = SMALL, memory: float = 40 * GIB, **others: object) -> Job:
    return Job(shape, 32, 8, memory, **others)  # type: ignore[arg-type]


def layer(made: Job, setup: Setup, at: int = 1) -> Layer:
    return layer_costs(made, setup).layers.layers[at]


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
    return Job(
        draw(st.sampled_from((SMALL, replace(MOE, layers=4), replace(SMALL, layers=6)))),
        draw(st.sampled_from((8, 24, 32))),
        draw(st.sampled_from((2, 4, 6, 8))),
        draw(st.floats(8, 60)) * GIB,
        gpus_per_node=draw(st.sampled_from((2, 4, 8))),
        fused=draw(st.booleans()),
        shards_optimizer=draw(st.booleans()),
    )


@SOME
@given(jobs())
def test_every_proposal_fits_and_divides(made):
    try:
        advice = advise(made, FEW)
    except ValueError as error:
        assume('do not divide into any setup' not in str(error))
        raise
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
@given(jobs(), st.integers(0, 10**6))
def test_never_slower_than_the_launch_line(made, at):
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
def test_the_search_misses_nothing(made):
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
def test_bounds_are_below(made, at):
    every = possible(made)
    assume(every)
    setup = every[at % len(every)]
    stages, found = stages_of(made, setup), predict(made, setup)
    assert stages.bound(found.microbatches) <= found.seconds * (1 + 1e-9)
    assert stages.least <= max(found.nbytes) * (1 + 1e-9)


def test_a_schedule_that_spares_memory_is_weighed_where_the_other_does_not_fit():
    names, shape = ('zb-v', 'v-half'), replace(SMALL, layers=16)
    setups = [Setup(1, 8, 2, 1, 1, name, NONE) for name in names]
    need, less = (max(predict(job(shape), setup).nbytes) for setup in setups)
    assert less < need
    found = {
        each.setup.schedule
        for memory in (need, (need + less) / 2)
        for each in advise(job(shape, memory, reserve=0.0), names, count=99).best
        if each.setup.pp == 8 and each.setup.saving == NONE and each.setup.micro_batch == 1
    }
    assert found == {*names}
    roomy = advise(job(shape, 800 * GIB), names, count=999)
    assert 'v-half' not in {each.setup.schedule for each in roomy.best}


@pytest.mark.parametrize('name', ['1f1b', 'interleaved', 'zb-h2', 'zb-v', 'v-half', 'po-h'])
@pytest.mark.parametrize('m', [64, 66])
def test_many_microbatches_are_as_if_simulated(name, m, monkeypatch):
    if name == 'interleaved' and m % 4:
        return  # Megatron's own wants a multiple
    setup = Setup(1, 4, 1 if name in ('1f1b', 'zb-h2') else 2, 1, 1, name)
    made = replace(job(), gpus=4, global_batch=m)
    short = predict(made, setup)
    monkeypatch.setattr(prediction, '_ROUNDS', 100)
    whole = predict(made, setup)
    assert short.seconds == pytest.approx(whole.seconds, rel=5e-3)
    assert short.nbytes == whole.nbytes and short.idle == pytest.approx(whole.idle, abs=5e-3)


def test_memory_that_grows_with_microbatches_is_of_all_of_them():
    made = replace(job(), gpus=4, global_batch=64)
    few = predict(replace(made, global_batch=8), Setup(1, 4, schedule='gpipe'))
    assert max(predict(made, Setup(1, 4, schedule='gpipe')).nbytes) > 4 * max(few.nbytes)


def test_layers_are_those_of_the_shape():
    """One rank of each kind: nothing is communicated, nothing runs again."""
    made = replace(job(), gpus=1)
    assert layer_costs(made, Setup(sequence_parallel=False)) == (layers_of(SMALL), 0.0)
    # four of a dense layer's F and B move 3/4 of s·b·h of bf16, tp = 4
    plain, made = layers_of(replace(SMALL, tp=4)).layers[1], layer(job(), Setup(4))
    talk = 4 * 2 * 2048 * 2048 * 3 / 4 / 300e9
    both = made.forward, made.backward
    assert both == pytest.approx((plain.forward + talk, plain.backward + talk))
    assert made.weight == plain.weight
    slow = layer(job(gpus_per_node=2), Setup(4))
    assert slow.forward == pytest.approx(plain.forward + 12 * talk)


def test_scores_of_attention():
    """They are 5·a·s²·b bytes, which selective recomputation does without."""
    kept, again = (layer(job(fused=False), Setup(2, saving=each)) for each in (NONE, SELECTIVE))
    scores = 5 * 16 * 2048**2 / 2
    assert kept.activation == 34 * 2048 * 2048 / 2 + scores
    assert again.activation == kept.activation - scores
    assert again.backward > kept.backward and again.forward == kept.forward
    # in full it keeps the input, 2·s·b·h, and B takes an F more; selective in between
    none, selective, full = (
        layer_costs(job(), Setup(2, saving=each)) for each in (NONE, SELECTIVE, FULL)
    )
    first = [each.layers.layers[1] for each in (none, selective, full)]
    assert first[2].activation == 2 * 2048 * 2048 / 2
    assert first[2].backward == pytest.approx(first[0].backward + first[0].forward)
    assert first[0].activation > first[1].activation > first[2].activation
    assert first[0].backward < first[1].backward < first[2].backward
    assert full.transient == first[0].activation - first[2].activation and not none.transient


def test_experts_are_shared_among_their_ranks():
    """Twice as many share them: half of the weights, and optimizer state as before."""
    one, two = (layer_costs(job(MOE), Setup(ep=ep)).layers.layers for ep in (1, 2))
    experts = 8 * 3 * 2048 * 1024
    assert one[5].parameters - two[5].parameters == pytest.approx(experts / 2 * 6)
    assert one[1].parameters == two[1].parameters, 'a dense layer has none'
    own = 2 * 2048 * 2 * 2048 * 1 / 2 / 300e9  # two experts a token, half elsewhere
    assert two[5].forward - one[5].forward == pytest.approx(2 * own)


def test_flags():
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
def test_processes(words, gpus, made):
    assert processes(words.split(), gpus, 8) == made.split()


# ---- By hand: each term of time and memory by itself.


H = SEQ = 2048
SBH = SEQ * H
FLOPS, BYTES, NODE, NET = 245e12, 2039e9, 300e9, 25e9  # a second
QUICK = replace(SMALL, bandwidth=0.0)  # of memory
EXPERTS = Shape('moe', 8, H, 16, 51200, SEQ, 245.0, groups=8, experts=8, expert_ffn=1024)
WEIGHTS = 8 * 12 * H**2 + 2 * 51200 * H


@pytest.mark.parametrize(
    ('changes', 'moved', 'step'),
    [
        ({}, 6, 30 / 8),
        ({'shards_optimizer': False}, 8, 30),  # gradients go around twice, no parameters
    ],
)
def test_a_step_moves_thirty_bytes_a_parameter(changes, moved, step):
    rest = stages_of(job(SMALL, **changes), Setup()).rest
    reduced = moved * WEIGHTS * 7 / 8 / NODE
    assert rest == pytest.approx(reduced + step * WEIGHTS / BYTES)


@pytest.mark.parametrize(('tp', 'near'), [(1, 4), (2, 2)])
def test_replicas_of_a_node_share_its_links_to_others(tp, near):
    dp, shard = 8 // tp, WEIGHTS / tp
    rest = stages_of(job(QUICK, gpus_per_node=4), Setup(tp)).rest
    assert rest == pytest.approx(6 * shard * (dp - 1) / dp / (near * NET))


def test_reduction_hides_behind_the_last_backward_of_the_shortest_stage():
    slow = job(QUICK, within=30.0)
    behind, beside = (stages_of(replace(slow, overlaps=each), Setup(1, 2)) for each in (0, 1))
    times = beside.costs.times
    last = [b + w for b, w in zip(times['B'], times['W'], strict=True)]
    assert last[0] < last[1] < behind.rest, 'the loss is on the second'
    assert beside.rest == pytest.approx(behind.rest - last[0])


@pytest.mark.parametrize('saving', [NONE, SELECTIVE, FULL])
def test_bytes_of_each_rank(saving):
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


def test_equally_fast_setups_come_with_the_least_memory_first():
    best = advise(Job(QUICK, 2, 2, 80 * 2.0**30), ('gpipe', '1f1b'), count=99).best
    equal = [pair for pair in itertools.pairwise(best) if pair[0].seconds == pair[1].seconds]
    held = [(max(a.nbytes), max(b.nbytes)) for a, b in equal]
    assert all(a <= b for a, b in held) and any(a < b for a, b in held)


def test_context_parallel_ranks_share_the_tokens():
    one, two = (layer(job(SMALL, cp=cp, fused=False), Setup()) for cp in (1, 2))
    for name in ('forward', 'backward', 'weight', 'activation', 'retained', 'output'):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2), name
    assert one.activation == 34 * SBH + 5 * 16 * SEQ**2
    assert job(QUICK, cp=2).shape_of(Setup()).dp == 8, 'they share the optimizer, too'


@pytest.mark.parametrize('shared', [True, False])
def test_messages_are_of_the_tokens_of_a_rank(shared):
    output = 2 * SBH / (4 if shared else 1)
    assert layer(job(QUICK), Setup(4, sequence_parallel=shared)).output == output


def test_ranks_of_an_expert_gather_its_tokens():
    """Of two ranks each: half goes to other experts, and all to the other rank, in and out."""
    fast = job(EXPERTS, within=1e9)
    talk = layer(job(EXPERTS), Setup(2, ep=2)).forward - layer(fast, Setup(2, ep=2)).forward
    collectives = 2 * 2 * SBH / 2 / NODE
    own = 2 * (SEQ / 2) * 2 * H
    assert talk == pytest.approx(collectives + 2 * (own / 2 + own) / NODE, rel=1e-4)
    # s·b·h·(10 + 24/t) bytes without sequence parallelism, of which 8 wait for W undivided
    for tp in (2, 4):
        made = layer(job(SMALL), Setup(tp, sequence_parallel=False))
        whole = layer(job(SMALL), Setup(tp, sequence_parallel=True))
        assert made.activation == pytest.approx(SBH * (10 + 24 / tp))
        assert whole.activation == pytest.approx(SBH * 34 / tp)
        assert made.retained is not None and whole.retained is not None
        assert made.retained - whole.retained == pytest.approx(8 * SBH * (1 - 1 / tp))


@pytest.mark.parametrize(('node', 'slow'), [(8, {3}), (4, {1, 3, 5}), (16, set())])
def test_stages_send_over_the_links_of_their_nodes(node, slow):
    """Of 16 GPUs two are a pipeline rank: four ranks of a node of eight."""
    made = stages_of(Job(QUICK, 32, 16, 40 * 2.0**30, gpus_per_node=node), Setup(2, 8))
    times = [SBH / (NET if k in slow else NODE) for k in range(7)]  # half of 2·s·b·h bytes
    assert made.costs.hops == tuple((pytest.approx(time),) * 2 for time in times)


def test_an_expert_of_one_rank_is_whole_there():
    """Four experts on each: of two tensor ranks an expert has both, or one and more replicas."""
    own = 4 * 3 * H * 1024
    whole, halves = (layer(job(EXPERTS, etp=etp), Setup(2, ep=2)).parameters for etp in (1, 2))
    assert whole - halves == pytest.approx(own * (6 + 12 / 4) - own / 2 * (6 + 12 / 2))


def test_times_of_layers():
    """A gathering in F of both, and of the loss in B."""
    talk = 2 * SBH * 3 / 4 / NODE
    for at, backward in ((0, 0.0), (-1, talk)):
        made, plain = layer(job(QUICK), Setup(4), at), layers_of(replace(QUICK, tp=4)).layers[at]
        wanted = plain.forward + talk, plain.backward + backward
        assert (made.forward, made.backward) == pytest.approx(wanted)
    # as much again as below it: 2·s²·h a sample; and they are written and read
    plain, scored = (layer(job(SMALL, fused=each), Setup()) for each in (True, False))
    more = 2 * SEQ**2 * H / FLOPS + 2 * 5 * 16 * SEQ**2 / BYTES
    assert scored.forward - plain.forward == pytest.approx(more)
    assert scored.backward - plain.backward == pytest.approx(2 * more)
    again = layer(job(SMALL, fused=False), Setup(saving=SELECTIVE))
    whole = 4 * SEQ**2 * H / FLOPS + 2 * 5 * 16 * SEQ**2 / BYTES
    assert again.backward - scored.backward == pytest.approx(whole)


def test_an_mlp_that_runs_again_talks_again():
    """It gathers and scatters once more: 2·2·s·b·h·1/2 bytes of two ranks."""
    added = [
        layer(made, Setup(2, saving=SELECTIVE)).backward - layer(made, Setup(2)).backward
        for made in (job(QUICK), job(QUICK, within=1e9))
    ]
    assert added[0] - added[1] == pytest.approx(2 * 2 * SBH / 2 / NODE, rel=1e-3)
    assert added[1] == pytest.approx(16 * SBH * H / 2 / FLOPS, rel=1e-3), 'both products'
    # a token takes two experts, and a shared one of the same size
    two, three = (
        layer(made, Setup(saving=SELECTIVE)).backward - layer(made, Setup()).backward
        for made in map(job, (EXPERTS, replace(EXPERTS, shared_ffn=1024)))
    )
    assert three == pytest.approx(1.5 * two) and two > 0


def test_each_kind_of_pass_is_measured_by_itself():
    own = Setup(1, 2)
    before = [sum(stages_of(job(QUICK), own).costs.times[kind]) for kind in 'FBW']
    wanted = [2 * before[0], 3 * before[1], 5 * before[2]]
    made = with_measured(job(QUICK), (wanted[0], wanted[1], wanted[2]), own)
    after = [sum(stages_of(made, own).costs.times[kind]) for kind in 'FBW']
    assert after == pytest.approx(wanted)
    setup = Setup(1, 4, 2, schedule='po-h')
    slow, fast = (max(predict(job(QUICK, host=rate), setup).nbytes) for rate in (1.0, 1000.0))
    assert slow > 1.1 * fast, 'what has no time to go stays'
    plain = replace(setup, schedule='zb-v')
    assert predict(job(QUICK, host=1.0), plain) == predict(job(QUICK, host=1000.0), plain)


def test_sizes():
    assert [job(QUICK).rate(ranks) for ranks in (8, 9)] == [NODE, NET]
    assert job(replace(QUICK, mtp=2)).counts(Setup(1, 2), Placement.loop(2)) == (5, 7)


@pytest.mark.parametrize('odd', [{'seq': SEQ + 2}, {'ffn': 4 * H + 2}, {'heads': 2}])
def test_tensor_parallel_ranks_divide(odd):
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
def test_a_flag_that_a_setup_has_no_use_for_is_left_out(name):
    change, flag = FLAGS[name]
    whole = Setup(2, 4, 2, 1, 1, 'zb-v', FULL)
    with_it, without = (' '.join(flags_of(job(QUICK), each)) for each in (whole, change(whole)))
    assert flag in with_it and flag not in without
