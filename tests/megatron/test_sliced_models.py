"""Slices of sequences in Megatron's models: as on one rank, close to whole sequences. That run
again, or are elsewhere between F and B: to the bit as without."""

import functools
import math
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import example
import pytest
import torch
from grids import grid
from models import MICROBATCHES, Job, assert_same, reference, train
from nvidia import by, needs_training, run, since
from outcome import logged
from supported import TOLERANCE, supports
from test_launch import NO_CLIPPING, PIPELINE

import megatron_zbpp
from megatron_zbpp.analysis.memory import peak
from megatron_zbpp.ir import B, F, Pass, Placement
from megatron_zbpp.ir.costs import Costs
from megatron_zbpp.planner.actions import plan_within
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.base import with_copies
from megatron_zbpp.techniques.evict import with_eviction
from megatron_zbpp.techniques.slices.balance import Attention, in_parts
from megatron_zbpp.techniques.slices.graph import Slicing, cuts_of, sized
from megatron_zbpp.techniques.slices.place import in_slices

SLICES = 4


def in_turn(job, argv):
    """Runs on one rank: what slices leave that run one by one, without a pipeline."""
    import pretrain_gpt as script

    from megatron_zbpp.mcore.patches.registry import Registry
    from megatron_zbpp.mcore.techniques import sliced_layers as slices
    from megatron_zbpp.mcore.techniques.sliced_layers import Running

    registry, running = Registry(), Running()
    registry.install(slices.patches(running))
    with mock.patch.object(script, 'get_forward_backward_func', lambda: _one_by_one(running)):
        try:
            return train(job, argv)
        finally:
            registry.undo()


def _one_by_one(running):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import unwrap_model

    from megatron_zbpp.mcore.iteration.stages import Arguments, Call, ModelStage
    from megatron_zbpp.mcore.techniques import sliced_layers as slices
    from megatron_zbpp.mcore.techniques.sliced import SliceWrapper

    def forward_backward(**given):
        arguments = Arguments(**given)
        call = Call(arguments, WeightGradStore(), 1, torch.device('cpu'))
        (model,), (data,) = arguments.models, arguments.iterators
        cuts = cuts_of(SLICES, arguments.seq_length)
        slices.require(unwrap_model(model))
        wraps = {'sliced': partial(SliceWrapper, cuts, running)}
        stage = ModelStage(call, model, data, None, True, wraps)
        for microbatch in range(arguments.num_microbatches):
            parts = [Pass(F, 0, microbatch, part) for part in range(SLICES)]
            outputs = [stage.forward(p, None) for p in parts]
            for p in reversed(parts):
                last = microbatch == arguments.num_microbatches - 1 and p.slice == 0
                with stage.grad_sync(last):
                    stage.backward(p._replace(kind=B), None, outputs[p.slice], None)
        by_token = stage.config.calculate_per_token_loss
        finalize_model_grads([model], call.num_tokens if by_token else None)
        return call.results

    return forward_backward


def by_slices(ranks, data, folder, job, schedule='zb-h1', early=False, more=()):
    """What a pipeline leaves by a schedule of slices, or by a name in `SLICES` of them."""
    name, made = 'made', schedule
    if isinstance(schedule, str):
        name, made = schedule, in_slices(schedule, job.pp, job.microbatches, SLICES)
    file = folder / f'{name}.json'
    file.write_text(made.to_json())
    own = replace(job, file=str(file))
    return ranks(job.size).run(train, own, [*own.argv('', early, data), *more])


@pytest.fixture(scope='module')
def one_by_one(ranks, data):
    """`one_by_one(kind)`: what the slices of a model leave on one rank; trained once."""

    @functools.cache
    def trained(kind):
        job = few(kind, pp=1, layers=4)
        return ranks(1).run(in_turn, job, [*job.argv('megatron', False, data), *UNTIED])

    return trained


UNTIED = ['--untie-embeddings-and-output-weights']
of_te = partial(Job, iterations=2, microbatches=2)
few = partial(of_te, te=False)
# of one rank, whose slices run one by one: what a pipeline adds is compared to the bit below
ONE_RANK = {
    'experts': few('experts', pp=1),  # which are balanced in each slice
    'one key for all queries': few('one key for all queries', pp=1),
    'window': few('window', pp=1),
    'YaRN': few(pp=1, positions='yarn'),
    'learned positions': few(pp=1, positions='learned_absolute'),
    'masks': few(pp=1, masks=True),
    'attention recomputed': few(pp=1, recompute='selective'),
}
JOBS = ONE_RANK | {
    'SwiGLU, query norms': few('SwiGLU', distributed=True, overlap=True, dp=2),
    'GPT, everything recomputed': few(recompute='full'),
    'bf16': few(bf16=True),
}
TE_JOBS = {
    'MLA with YaRN': of_te('MLA', pp=1),
    'MLA with plain RoPE': of_te('MLA with plain RoPE', pp=1),
    'window': of_te('window', pp=1),
    'SwiGLU, attention recomputed': of_te('SwiGLU', fused=True, recompute='selective'),
    'tensor and sequence parallel': of_te(tp=2),
    'experts': of_te('unbalanced experts', ep=2, dp=2, distributed=True, fused=True, overlap=True),
}


def close(trained, reference, relative, gradients=True):
    """Losses, norms, and of each parameter the optimizer's mean of gradients."""
    for found, expected in zip(trained, reference, strict=True):
        for ours, theirs in zip(
            found.losses + found.norms, expected.losses + expected.norms, strict=True
        ):
            assert (ours is None) == (theirs is None)
            assert ours is None or math.isclose(ours, theirs, rel_tol=relative), (ours, theirs)
        assert found.states.keys() == expected.states.keys() and found.states
        for key, (_, _, state) in expected.states.items() if gradients else ():
            mean = state['exp_avg']
            off = (found.states[key][2]['exp_avg'] - mean).abs().max()
            assert off <= relative * mean.abs().max(), (key, off)


@pytest.mark.parametrize('name', JOBS)
def test_close_to_whole_sequences(ranks, data, tmp_path, name):
    close_to_whole(ranks, data, tmp_path, JOBS[name])


@pytest.mark.te
@pytest.mark.parametrize('name', TE_JOBS)
def test_transformer_engines_layers(te_ranks, data, tmp_path, name):
    close_to_whole(te_ranks, data, tmp_path, TE_JOBS[name])


def close_to_whole(ranks, data, folder, job):
    if job.pp == 1:
        found = ranks(1).run(in_turn, job, job.argv('megatron', False, data))
    else:
        found = by_slices(ranks, data, folder, job)
    exact = job.kind != 'experts'
    relative = 2e-2 if job.bf16 else 1e-6 if exact else 5e-3
    close(found, reference(ranks, data, job), relative, exact)


def test_the_cases_differ(ranks, data):
    """Positions, windows and masks change the loss, so a slice that forgot them would show."""
    losses = {reference(ranks, data, job)[0].losses[0] for job in ONE_RANK.values()}
    assert len(losses) == len(ONE_RANK)


@grid(
    when=lambda kind, schedule, p: p == 2 or schedule in ('1f1b', 'zb-h1'),  # of 4 layers
    kind=('dense', 'SwiGLU', 'experts', 'dense'),
    schedule=('zb-h1', '1f1b', 'zb-v', 'interleaved'),
    p=(4, 2, 2, 2),
)
def test_as_on_one_rank(ranks, data, one_by_one, tmp_path, kind, schedule, p):
    """Slices in the pipeline give the bits of the same slices one by one."""
    job = few(kind, pp=p, layers=4 // p)
    found = by_slices(ranks, data, tmp_path, job, schedule, more=UNTIED)
    assert_same(found, one_by_one(kind), job.iterations)


def test_forwards_ahead(ranks, data, one_by_one, tmp_path):
    early = by_slices(ranks, data, tmp_path, few(), early=True, more=UNTIED)
    assert_same(early, one_by_one('dense'), 2)
    assert any(rank.early for rank in early)


def test_dropout(ranks, data, tmp_path):
    """Each stage draws slice by slice: all schedules of one stage a rank draw the same masks."""
    job = few(dropout=0.1, recompute='full')
    found = [by_slices(ranks, data, tmp_path, job, name) for name in ('1f1b', 'zb-h1')]
    assert_same(*found, job.iterations)
    assert found[0][1].losses[0] != by_slices(ranks, data, tmp_path, few())[1].losses[0]


@pytest.fixture(scope='module')
def stock(ranks, tmp_path_factory):
    """Losses of Megatron's own 1F1B, and flags that go on from its checkpoint."""
    folder = tmp_path_factory.mktemp('stock')
    flags = [*PIPELINE, *NO_CLIPPING, '--global-batch-size', 4, '--train-iters', 3]
    found = run(ranks(2), *flags, '--save', folder, '--save-interval', 1)
    return found, [*flags, '--load', folder, '--ckpt-step', 1]


@pytest.fixture(scope='module')
def first(ranks, stock):
    """`first(slices)`: what 1F1B leaves in these slices; trained once."""
    args = '--pipeline-schedule', '1f1b', '--pipeline-slices'
    return functools.cache(lambda slices: run(ranks(2), *stock[1], *args, slices))


@supports("NVIDIA's loop: slices of sequences", outcome=TOLERANCE)
@needs_training
@grid(
    schedule=('zb-v', 'seq1f1b', 'seq1f1b-interleaved+post-validation'),
    slices=('4', '6,4,3,3', '4'),
)
def test_nvidias_loop(ranks, stock, first, schedule, slices):
    """From a checkpoint of Megatron's own 1F1B; uneven slices, too, and all to the same bits."""
    whole, flags = stock
    found = run(ranks(2), *flags, *by(schedule), '--pipeline-slices', slices)
    other = first(slices)
    assert found.losses == other.losses and found.parameters == other.parameters
    for iteration, (loss, *rest) in since(1, whole.losses).items():
        own, *others = found.losses[iteration]
        assert math.isclose(float.fromhex(own), float.fromhex(loss), rel_tol=1e-6)
        assert others == rest


def test_evaluation(ranks, data, tmp_path):
    """Validation losses are those of whole sequences, and evaluating leaves training alone."""
    common = ['--num-layers', 4, '--pipeline-model-parallel-size', 2, '--clip-grad', 1e9]
    common += ['--data-path', data, '--global-batch-size', 2, '--train-iters', 2]
    evaluating = [*common, '--eval-interval', 1, '--eval-iters', 1]
    stock = example.run(ranks(2), *evaluating, '--pipeline-schedule', 'megatron')
    file = tmp_path / 'slices.json'
    file.write_text(in_slices('zb-v', 2, 2, SLICES).to_json())
    ours = ['--pipeline-schedule-file', file]
    found = example.run(ranks(2), *evaluating, *ours)
    assert found.losses == example.run(ranks(2), *common, *ours).losses
    for own, whole in zip(found.validation, stock.validation, strict=True):
        assert math.isclose(float.fromhex(own), float.fromhex(whole), rel_tol=1e-6)
    assert len(stock.validation) == 2


LONG = ['--seq-length', '1024']


def told(_=None):
    """What the plugin logs within the block of slices that it has found."""
    return logged('megatron_zbpp', ': as --pipeline-slices ')


def sizes_in(line):
    """The sizes that a line says."""
    return re.search(r'--pipeline-slices ([\d,]+), which', line)[1]


def sliced(slices, job, argv):
    """Runs on a rank: trains by `megatron_zbpp.enable(slices=)`; also returns what it said."""
    import pretrain_gpt as script

    enable = partial(megatron_zbpp.enable, slices=slices)
    with told() as said, mock.patch.object(script.megatron_zbpp, 'enable', enable):
        return train(job, argv), said


@supports('slices of sequences that are found: {slices}', '{schedule}')
@grid(slices=('auto:200', 'balanced:3'), schedule=('zb-v', '1f1b'))
def test_at_the_first_call(ranks, data, slices, schedule):
    """Said once, by one rank; given as they are said, they leave the same bits."""
    job = few()
    argv = [*job.argv(schedule, False, data), *LONG]
    found = ranks(2).run(sliced, slices, job, argv)
    lines = [line for _, own in found for line, _ in own]
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
def test_found_in_nvidias_loop(ranks):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 2, '--global-batch-size', 2]
    flags += [*LONG, '--max-position-embeddings', 1024, '--pipeline-schedule', 'zb-v']
    found = run(ranks(2), *flags, '--pipeline-slices', 'balanced:3', event=told)
    ((line, _),) = (told for lines in found.reported for told in lines)
    pinned = run(ranks(2), *flags, '--pipeline-slices', sizes_in(line))
    assert found.losses == pinned.losses and found.parameters == pinned.parameters


all_of = partial(Job, te=False)


def plan(name, evicts):
    """A schedule of slices; the first rank holds less than it takes, where it evicts."""
    plain = in_slices(name, 2, MICROBATCHES, SLICES)
    if not evicts:
        return plain
    costs = Costs.uniform(plain.placement)
    made = with_eviction(plain, range(plain.num_stages), costs, [0.6 * peak(plain, costs)[0], 99.0])
    assert any(p.kind == 'E' for _, p in made)
    return made


ASKED = {
    'recompute': {'again': 'all'},
    'offload': {'offload': 'all'},
    'recompute+offload': {'again': '1', 'offload': 'all'},
    'evict': {},
    'recompute+evict': {'again': '1'},
}


def compare(ranks, data, tmp_path, actions, schedule, early=False, **of_job):
    """Train with these and without: to the bit, and what is asked for happens."""
    plain, found = (
        by_slices(ranks, data, tmp_path, all_of(**of_job, **asked), plan(schedule, evicts), early)
        for asked, evicts in (({}, False), (ASKED[actions], 'evict' in actions))
    )
    assert_same(found, plain)
    assert (actions != 'recompute') == any(rank.moved for rank in found)
    assert not early or any(rank.early for rank in found)


@supports('slices of sequences as without {actions}', '{schedule}')
@grid(
    actions=('recompute+offload', 'evict', 'recompute'),
    schedule=('zb-v', '1f1b', 'interleaved'),
    dropout=(0.0, 0.1, 0.1),
)
def test_actions_to_the_bit(ranks, data, tmp_path, actions, schedule, dropout):
    """Keys and values stay; slices run again with those of the slices before, last slice first."""
    compare(ranks, data, tmp_path, actions, schedule, dropout=dropout)


@pytest.mark.full
@supports('slices of sequences as without {actions}', '{schedule}')
@grid(actions=('offload', 'recompute+evict'), schedule=('zb-h1', 'zb-v', 'gpipe'))
def test_every_action(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, dropout=0.1)


@pytest.mark.full
@supports(
    'slices of sequences as without {actions}: optimizer steps that do not wait', '{schedule}'
)
@grid(actions=('recompute', 'offload', 'evict'), schedule=('zb-h1',))
def test_forwards_ahead_of_actions(ranks, data, tmp_path, actions, schedule):
    compare(ranks, data, tmp_path, actions, schedule, early=True)


@pytest.mark.full
@supports('slices of sequences as without {action}: planned', 'by `zbpp plan`')
@grid(action=('offload', 'recompute', 'evict'))
def test_planned_actions(ranks, data, tmp_path, action):
    """Of uneven slices, on two stages a rank; the same slices in the order of a name leave it."""
    graph, placement = Slicing(3, (6, 5, 5)), Placement.v(2)
    costs = with_copies(Costs.uniform(placement), 0.2, ('E', 'K'))
    costs = costs.with_times(R=costs.times['F']).with_amounts(input=(0.02,) * 4)
    costs = in_parts(costs, graph.sizes, Attention())
    limits = (0.8, 2.5) if action == 'evict' else 0.9
    asked = {'actions': (action,), 'memory_limit': limits, 'seconds': 0.5, 'graph': graph}
    made = plan_within([(placement, costs)], MICROBATCHES, **asked).schedule
    assert {p.kind for _, p in made} >= {{'recompute': 'R', 'offload': 'L', 'evict': 'E'}[action]}
    plain = in_slices('zb-v', 2, MICROBATCHES, 3)
    plain = replace(plain, graph=sized(plain.graph, graph.sizes))
    kept, found = (by_slices(ranks, data, tmp_path, all_of(), each) for each in (plain, made))
    assert_same(found, kept)
    assert (action != 'recompute') == any(rank.moved for rank in found)


@pytest.mark.te
@pytest.mark.full
@supports("slices of sequences as without {actions}: {kind} of Transformer Engine's", 'zb-v')
@grid(actions=('recompute+offload', 'evict', 'recompute'), kind=('SwiGLU', 'MLA', 'dense'))
def test_actions_of_te_layers(te_ranks, data, tmp_path, actions, kind):
    compare(te_ranks, data, tmp_path, actions, 'zb-v', kind=kind, te=True, fused=True)


@pytest.mark.full
@supports("NVIDIA's loop: slices of sequences as without {actions}", 'zb-v')
@needs_training
@grid(actions=('--pipeline-recompute 1 --pipeline-offload all', '--pipeline-recompute all'))
def test_actions_in_nvidias_loop(ranks, actions):
    flags = [*PIPELINE, *NO_CLIPPING, '--train-iters', 3, '--pipeline-slices', 4]
    plain = run(ranks(2), *flags, '--pipeline-schedule', 'zb-v')
    found = run(ranks(2), *flags, '--pipeline-schedule', 'zb-v', *actions.split())
    assert found.losses == plain.losses and found.parameters == plain.parameters


@pytest.mark.full
@supports('slices of sequences as by 1f1b: GPT on 4 ranks', 'bpipe')
def test_bpipe(ranks, data, tmp_path):
    """Named, with slices: it evicts, and leaves what 1F1B in the same slices does."""
    plain, found = (
        by_slices(ranks, data, tmp_path, all_of(pp=4), name) for name in ('1f1b', 'bpipe')
    )
    assert_same(found, plain)
    assert any(rank.moved for rank in found)
