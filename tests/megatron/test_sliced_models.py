"""Slices of sequences in Megatron's models: as on one rank, close to whole sequences."""

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
from models import Job, assert_same, reference, train
from nvidia import by, needs_training, run, since
from outcome import logged
from supported import TOLERANCE, supports
from test_launch import NO_CLIPPING, PIPELINE

import megatron_zbpp
from megatron_zbpp.ir import B, F, Pass
from megatron_zbpp.runtime.weight_grads import WeightGradStore
from megatron_zbpp.techniques.slices.graph import cuts_of
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


def by_slices(ranks, data, tmp_path, job, name='zb-h1', early=False, more=()):
    """What a pipeline leaves."""
    file = tmp_path / f'{name}.json'
    file.write_text(in_slices(name, job.pp, job.microbatches, SLICES).to_json())
    own = replace(job, file=str(file))
    return ranks(job.size).run(train, own, [*own.argv('', early, data), *more])


@pytest.fixture(scope='module')
def one_by_one(ranks, data):
    """`one_by_one(kind)`: what the slices of a model leave on one rank; trained once."""
    return functools.cache(lambda kind: ranks(1).run(in_turn, alone(kind), untied(kind, data)))


def alone(kind, **more):
    return few(kind, te=False, pp=1, layers=4, **more)


def untied(kind, data):
    return [*alone(kind).argv('megatron', False, data), *UNTIED]


UNTIED = ['--untie-embeddings-and-output-weights']
few = partial(Job, iterations=2, microbatches=2)
JOBS = {
    'SwiGLU, query norms': few('SwiGLU', te=False, distributed=True, overlap=True, dp=2),
    'GPT, everything recomputed': few(te=False, recompute='full'),
    'bf16': few(te=False, bf16=True),
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


@pytest.mark.parametrize('job', JOBS.values(), ids=JOBS)
def test_close_to_whole_sequences(ranks, data, tmp_path, job):
    stock = reference(ranks, data, job)
    close(by_slices(ranks, data, tmp_path, job), stock, 2e-2 if job.bf16 else 1e-6)


MODELS = {
    'experts': few('experts', te=False, pp=1),  # which are balanced in each slice
    'one key for all queries': few('one key for all queries', te=False, pp=1),
    'window': few('window', te=False, pp=1),
    'YaRN': few(te=False, pp=1, positions='yarn'),
    'learned positions': few(te=False, pp=1, positions='learned_absolute'),
    'masks': few(te=False, pp=1, masks=True),
    'attention recomputed': few(te=False, pp=1, recompute='selective'),
}


@pytest.fixture(scope='module')
def whole(ranks, data):
    """`whole(name)`: what whole sequences leave on one rank; trained once."""
    return functools.cache(lambda name: reference(ranks, data, MODELS[name]))


@pytest.mark.parametrize('name', MODELS)
def test_slices_one_by_one(ranks, data, whole, name):
    """On one rank: what the pipeline adds to that is compared to the bit below."""
    job, exact = MODELS[name], name != 'experts'
    found = ranks(1).run(in_turn, job, job.argv('megatron', False, data))
    close(found, whole(name), 1e-6 if exact else 5e-3, exact)


def test_the_cases_differ(whole):
    """Positions, windows and masks change the loss, so a slice that forgot them would show."""
    assert len({whole(name)[0].losses[0] for name in MODELS}) == len(MODELS)


TE_MODELS = {
    'MLA with YaRN': few('MLA', pp=1),
    'MLA with plain RoPE': few('MLA with plain RoPE', pp=1),
    'window': few('window', pp=1),
}


@pytest.mark.te
@pytest.mark.parametrize('job', TE_MODELS.values(), ids=TE_MODELS)
def test_transformer_engines_slices_one_by_one(te_ranks, data, job):
    found = te_ranks(1).run(in_turn, job, job.argv('megatron', False, data))
    close(found, reference(te_ranks, data, job), 1e-6)


TE_JOBS = {
    'SwiGLU, attention recomputed': few('SwiGLU', fused=True, recompute='selective'),
    'tensor and sequence parallel': few(tp=2),
    'experts': few('unbalanced experts', ep=2, dp=2, distributed=True, fused=True, overlap=True),
}


@pytest.mark.te
@pytest.mark.parametrize('job', TE_JOBS.values(), ids=TE_JOBS)
def test_transformer_engines_layers(te_ranks, data, tmp_path, job):
    stock = reference(te_ranks, data, job)
    close(by_slices(te_ranks, data, tmp_path, job), stock, 1e-6)


@grid(
    when=lambda kind, schedule, p: p == 2 or schedule in ('1f1b', 'zb-h1'),  # of 4 layers
    kind=('dense', 'SwiGLU', 'experts', 'dense'),
    schedule=('zb-h1', '1f1b', 'zb-v', 'interleaved'),
    p=(4, 2, 2, 2),
)
def test_as_on_one_rank(ranks, data, one_by_one, tmp_path, kind, schedule, p):
    """Slices in the pipeline give the bits of the same slices one by one."""
    job = few(kind, te=False, pp=p, layers=4 // p)
    found = by_slices(ranks, data, tmp_path, job, schedule, more=UNTIED)
    assert_same(found, one_by_one(kind), job.iterations)


def test_forwards_ahead(ranks, data, one_by_one, tmp_path):
    early = by_slices(ranks, data, tmp_path, few(te=False), early=True, more=UNTIED)
    assert_same(early, one_by_one('dense'), 2)
    assert any(rank.early for rank in early)


def test_dropout(ranks, data, tmp_path):
    """Each stage draws slice by slice: all schedules of one stage a rank draw the same masks."""
    job = few(te=False, dropout=0.1, recompute='full')
    found = [by_slices(ranks, data, tmp_path, job, name) for name in ('1f1b', 'zb-h1')]
    assert_same(*found, job.iterations)
    assert found[0][1].losses[0] != by_slices(ranks, data, tmp_path, few(te=False))[1].losses[0]


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


def scales():
    """Runs on a rank: the scale of auxiliary losses within a slice, and behind it; by token."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_zbpp.mcore.techniques.sliced import _of_slice
    from megatron_zbpp.mcore.techniques.sliced_layers import Slice

    found = []
    for scale, by_token in ((None, False), (torch.tensor(8.0), False), (torch.tensor(8.0), True)):
        with mock.patch.object(MoEAuxLossAutoScaler, 'main_loss_backward_scale', scale):
            with _of_slice(Slice(0, 2, 4, 8), by_token):
                found.append(MoEAuxLossAutoScaler.main_loss_backward_scale)
            found.append(MoEAuxLossAutoScaler.main_loss_backward_scale)
    return found


def test_auxiliary_losses_weigh_what_their_slice_has(ranks):
    assert ranks(1).run(scales) == [[None, None, 2.0, 8.0, 8.0, 8.0]]


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
    job = Job(te=False, iterations=2, microbatches=2)
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
