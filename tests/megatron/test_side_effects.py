"""Forwards that may be dropped leave no random numbers behind, whatever keeps their states; and
programs whose forwards may not run twice, or whose parameters arrive by hooks."""

import functools
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from unittest import mock

import pytest
import torch
from grids import some
from models import assert_same, train
from nvidia import needs_training, run
from ranks import RankError
from test_launch import DISTRIBUTED, NO_CLIPPING, OVERLAP, PIPELINE
from test_sliced_models import UNTIED
from test_vocabulary_loop import ALL, FLAG, TIED
from test_vocabulary_training import BOTH, HOSTS, OUTPUT, few, of_ranks, train_in_shards

from megatron_zbpp.mcore.side_effects import SideEffects, isolated

SEED = 5


class Generator(torch.Generator):
    """As CUDA's, several of which may hold one state: that the CPU's cannot."""

    state: torch.Generator

    @classmethod
    def of(cls, state):
        made = cls()
        made.state = state
        return made

    def graphsafe_get_state(self):
        return Generator.of(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def clone_state(self):
        return Generator.of(self.state.clone_state())

    def manual_seed(self, seed):
        self.state.manual_seed(seed)
        return self

    def get_state(self):
        return self.state.get_state()

    def set_state(self, value):
        self.state.set_state(value)
        return self


def drawn(tracker):
    """What is drawn ahead, drawn again, and drawn once they are shown; and the same undisturbed.
    Also, for each state that generators share, whether it is the same one as before."""
    from megatron.core.tensor_parallel import random

    graph_safe = tracker != 'tensors'
    default = Generator.of(torch.Generator()) if graph_safe else torch.default_generator

    def two():
        return torch.rand(2, generator=default.state if graph_safe else default).tolist()

    def draw():
        """Of the device's own and of the tracked state, as dropout of a layer does."""
        own = two()
        with random.get_cuda_rng_tracker().fork():
            return own + two()

    def states():
        tracked = random.get_cuda_rng_tracker().get_states().values()
        return [default.state, *(each.state for each in tracked)] if graph_safe else []

    def begin():
        random.initialize_rng_tracker(
            use_te_rng_tracker=tracker == 'te',
            use_cudagraphable_rng=tracker == 'graphs',
            force_reset=True,
        )
        random.get_cuda_rng_tracker().add('model-parallel-rng', SEED)
        default.manual_seed(SEED + 1)

    effects = SideEffects([torch.nn.Linear(2, 2)])
    with (
        mock.patch.object(torch.cuda, 'default_generators', (default,) * 8),
        mock.patch.object(torch.cuda.CUDAGraph, 'register_generator_state', create=True),
    ):
        try:
            begin()
            undisturbed = [draw(), draw()]
            begin()
            held = states()
            with effects.capture():
                found = [draw()]
            found.append(draw())
            effects.commit()
            found.append(draw())
            now = states()
        finally:
            random.initialize_rng_tracker(force_reset=True)
    return found, undisturbed, [a is b for a, b in zip(held, now, strict=True)]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize('tracker', ['tensors', 'graphs'])
def test_megatrons_tracker(tracker):
    found, (first, second), same = drawn(tracker)
    assert found == [first, first, second] and first != second
    assert same == [True] * 2 * (tracker != 'tensors'), 'graphs are captured with them'


@pytest.mark.te
@pytest.mark.on_ranks(2)
@pytest.mark.usefixtures('te_ranks')
def test_transformer_engines_tracker():
    """--te-rng-tracker"""
    test_megatrons_tracker('te')


@pytest.mark.on_ranks(2)
def test_losses_of_multi_token_prediction():
    """Those of forwards ahead are not shown, but with their own."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker

    def forward(loss):
        tracker.setdefault('values', torch.zeros(1)).add_(loss)
        tracker['avg_group'] = 'group'

    tracker.clear()
    try:
        forward(1.0)
        effects = SideEffects([])
        with effects.capture():
            forward(2.0)
        ahead = tracker['values'].item()
        tracker['values'].zero_()  # as Megatron does once they are logged
        tracker['avg_group'] = None
        effects.commit()
        forward(4.0)
        assert ahead == 1 and tracker['values'].item() == 6 and tracker['avg_group'] == 'group'
    finally:
        tracker.clear()


@pytest.mark.on_ranks(2)
def test_a_program_finds_what_was_there():
    """A buffer, and random numbers: those that a program draws matter where forwards ahead have
    drawn some, and only there."""

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('count', torch.zeros(1))
            self.register_buffer('same', torch.ones(1))

    torch.manual_seed(SEED)
    module = Counter()
    effects = SideEffects([module])
    with effects.capture():
        module.count.data.add_(2)  # torch does not count that
    between = module.count.item(), effects.drawn_since()
    module.same.add_(1)  # the program's
    own = torch.rand(1).item()
    drawn = effects.drawn_since()
    effects.commit()
    again = torch.rand(1).item() == own
    effects = SideEffects([module])
    with effects.capture():
        torch.rand(1)
    torch.rand(1)
    assert between == (0, False) and not drawn and not again and effects.drawn_since()
    assert module.count.item() == module.same.item() == 2


@pytest.mark.on_ranks(1)
def test_an_isolated_step_leaves_nothing():
    """What it draws of a tracked state is drawn again after it; also where it seeds all anew."""
    from megatron.core.tensor_parallel import random

    def seed(value):
        random.initialize_rng_tracker(force_reset=True)
        random.get_cuda_rng_tracker().add('model-parallel-rng', value)

    def draw():
        with random.get_cuda_rng_tracker().fork():
            return torch.rand(2).tolist()

    def reseeding():
        random.get_cuda_rng_tracker().reset()
        random.get_cuda_rng_tracker().add('model-parallel-rng', SEED + 1)
        return draw()

    found = []
    with mock.patch.object(torch.cuda, 'default_generators', (torch.default_generator,) * 8):
        for step in (lambda: None, draw, reseeding):
            seed(SEED)
            found.append((isolated(step), draw()))
    random.initialize_rng_tracker(force_reset=True)
    ((_, left), (one, left_by_one), (other, left_by_other)) = found
    assert left == left_by_one == left_by_other == one != other


def stepped(how, change, job, argv):
    """Runs on each rank: trains with another forward_step."""
    import pretrain_gpt as script

    with mock.patch.object(script, 'forward_step', change(script.forward_step)):
        return how(job, argv)


def with_own_backward(original):
    def forward_step(*args):
        with torch.enable_grad():
            torch.ones(2, requires_grad=True).square().sum().backward()
        return original(*args)

    return forward_step


def with_own_gradient(original):

    def forward_step(*args):
        def loss(losses):
            weight = torch.ones(2, requires_grad=True)
            with torch.enable_grad():
                torch.autograd.grad(weight.square().sum(), weight)
            return loss_function(losses)

        output, loss_function = original(*args)
        return output, loss

    return forward_step


@pytest.mark.parametrize(
    ('change', 'recompute', 'later'),
    [
        (with_own_backward, None, False),
        (with_own_backward, 'all', False),
        (with_own_gradient, None, True),
    ],
)
def test_a_backward_inside_a_forward(ranks, data, change, recompute, later):
    """Through layers of the program's own it runs where each forward runs once, in its turn."""
    job = replace(few(), again=recompute)
    argv = job.argv('zb-h1', later, data)
    refused = pytest.raises(RankError, match='NotImplementedError: a backward inside a forward ')
    with refused if recompute or later else nullcontext():
        trained = ranks(2).run(stepped, train, change, job, argv)
        assert_same(trained, ranks(2).run(train, job, argv), job.iterations)


def with_noise(original):
    """The model gets other tokens each time."""

    def forward_step(data, model, *args):
        def noisy(tokens, *rest, **named):
            return model((tokens + torch.randint(2, tokens.shape)) % 24, *rest, **named)

        return original(data, noisy, *args)

    return forward_step


def test_tokens_of_the_second_call(ranks, data):
    """With the embedding on all ranks forward_step is called twice for each microbatch."""
    job = few()
    how = functools.partial(train_in_shards, BOTH, None)
    with pytest.raises(RankError, match='NotImplementedError: other tokens in the second call'):
        ranks(2).run(stepped, how, with_noise, job, job.argv('zb-h1', False, data))


def arriving_late(original):
    """`run_batch`, with NaN in each parameter until a hook of its module is called. In shards of
    layers again behind each of their calls, as where hooks free what they gather."""

    def run_batch(args, models, *rest, **options):
        from megatron_zbpp.mcore.techniques.vocabulary_shards import InputShard, OutputShard

        modules = [module for model in models for module in model.modules()]
        values = {p: p.detach().clone() for model in models for p in model.parameters()}
        called = set()

        def arrive(module, *_):
            called.add(module)
            for p in module.parameters(recurse=False):
                p.data.copy_(values[p])

        def leave(module, *_):
            for p in module.parameters(recurse=False):
                p.data.fill_(torch.nan)

        hooks = [module.register_forward_pre_hook(arrive) for module in modules]
        shards = [module for module in modules if isinstance(module, InputShard | OutputShard)]
        hooks += [shard.register_forward_hook(leave) for shard in shards]
        for module in modules:
            leave(module)
        try:
            return original(args, models, *rest, **options)
        finally:
            for hook in hooks:
                hook.remove()
            for module in modules:
                assert module in called or not [*module.parameters(recurse=False)], module
                arrive(module)

    return run_batch


def train_late(how, job, argv):
    import pretrain_gpt as script

    with mock.patch.object(script, 'run_batch', arriving_late(script.run_batch)):
        return how(job, argv)


# schedule, layers on all ranks, whether they are tied, of the job, techniques
CASES = {
    'whole layers': ('zb-v', None, False, {}, {}),
    'experts': ('zb-h1', None, False, {'kind': 'experts'}, {}),
    'output layer': ('1f1b', OUTPUT, False, {}, {'recompute': 'all'}),
    'both': ('zb-h1', BOTH, False, {}, {}),
    'both, sliced': ('zb-v', BOTH, False, {}, {'slices': 4, 'offload': 'all'}),
    'both, tied': ('zb-v', BOTH, True, {}, {}),
}


@pytest.mark.parametrize('case', CASES)
def test_hooks_run_before_parameters_are_read(ranks, data, case):
    schedule, layers, tied, of_job, more = CASES[case]
    job = replace(few(), **of_job)
    argv = [*job.argv(schedule, False, data), *([] if tied else UNTIED)]
    how = train
    if layers:
        options = {'slices': None, **more}
        how = functools.partial(train_in_shards, layers, options.pop('slices'), **options)
    late, found = ranks(2).run(train_late, how, job, argv), ranks(2).run(how, job, argv)
    assert_same(*(of_ranks(each, layers) for each in (late, found)), job.iterations)


@needs_training
@some('layers, schedule', [(TIED, '1f1b')], *product(ALL, HOSTS))
def test_gathers_that_overlap(ranks, layers, schedule):
    """Replicas gather parameters while forwards run: to the bit as where all wait for them."""
    layers, _, tied = layers.partition(', ')
    flags = [*PIPELINE, *NO_CLIPPING, *DISTRIBUTED, *OVERLAP, '--train-iters', 3]
    flags += ['--pipeline-schedule', schedule, FLAG, layers, *([] if tied else UNTIED)]
    assert run(ranks(4), *flags, '--overlap-param-gather') == run(ranks(4), *flags)
