"""Forwards that may be dropped leave no random numbers behind, whatever keeps their states."""

from unittest import mock

import pytest
import torch

from megatron_zbpp.mcore.side_effects import SideEffects, isolated

SEED = 5


def generator_class():
    """CUDA's generators, several of which may hold one state: that the CPU's cannot."""

    class Generator(torch.Generator):
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

    return Generator


def drawn(tracker):
    """What is drawn ahead, drawn again, and drawn once they are shown; and the same undisturbed.
    Also, for each state that generators share, whether it is the same one as before."""
    from megatron.core.tensor_parallel import random

    graph_safe = tracker != 'tensors'
    default = torch.default_generator
    if graph_safe:
        default = generator_class().of(torch.Generator())

    def draw():
        """Of the device's own and of the tracked state, as dropout of a layer does."""
        source = default.state if graph_safe else default
        made = torch.rand(2, generator=source).tolist()
        with random.get_cuda_rng_tracker().fork():
            source = default.state if graph_safe else default
            return made + torch.rand(2, generator=source).tolist()

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


def check(results, graph_safe):
    for found, (first, second), same in results:
        assert found == [first, first, second] and first != second
        assert same == [True] * 2 * graph_safe, 'graphs are captured with them'


@pytest.mark.parametrize('tracker', ['tensors', 'graphs'])
def test_megatrons_tracker(ranks, tracker):
    check(ranks(2).run(drawn, tracker), tracker == 'graphs')


@pytest.mark.te
def test_transformer_engines_tracker(te_ranks):
    """--te-rng-tracker"""
    check(te_ranks(2).run(drawn, 'te'), True)


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
