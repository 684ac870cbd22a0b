"""A speculative step leaves the optimizer as it was, and the model as a step would."""

import math
from unittest import mock

import pytest
import torch
from grids import grid
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zbpp.post_validation.data_iterators import ReplayIterator
from megatron_zbpp.post_validation.protocol import EarlyStepPolicy, Prefix, is_clean
from megatron_zbpp.post_validation.speculative_step import SpeculativeStep, Stepped

OPTIMIZERS = {
    'adam': lambda p: torch.optim.Adam(p, lr=0.1),
    'adamw': lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    'sgd': lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    'plain sgd': lambda p: torch.optim.SGD(p, lr=0.1),
}


def parameters(count, size=64):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, generator=generator).requires_grad_() for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn(size, generator=generator)
    return made


def everything(optimizer):
    """All that a step changes, as values that compare."""
    groups = [p.detach().tolist() for g in optimizer.param_groups for p in g['params']]
    state = [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for g in optimizer.param_groups
        for p in g['params']
        if p in optimizer.state
    ]
    return groups, state


NOTHING, SOME, ALL = 0, 2400, 1 << 20  # bytes of state that it keeps


@pytest.mark.parametrize('clean', [True, False])
@pytest.mark.parametrize('kept_bytes', [NOTHING, SOME, ALL])
@pytest.mark.parametrize('in_place', [True, False], ids=['in place', 'copies'])
@pytest.mark.parametrize('steps_before', [0, 2])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_speculative_then_true_step(name, steps_before, in_place, kept_bytes, clean):
    """A clean step is completed; one that is not begins where the speculative one began."""
    own, reference = parameters(5), parameters(5)
    optimizer, synchronous = OPTIMIZERS[name](own), OPTIMIZERS[name](reference)
    for _ in range(steps_before):
        optimizer.step()
        synchronous.step()
    read = [None if in_place else torch.empty(64, dtype=torch.bfloat16) for _ in own]
    before = everything(optimizer)
    stepped = list(map(Stepped, own, read))
    speculative = SpeculativeStep(optimizer, stepped, buffer_bytes=600, kept_bytes=kept_bytes)
    synchronous.step()
    for parameter, copy, after in zip(own, read, reference, strict=True):
        seen = parameter if copy is None else copy
        assert torch.equal(seen, after.to(seen.dtype))
    speculative.undo()
    if kept_bytes == NOTHING:
        assert speculative.kept_bytes == 0 and everything(optimizer) == before
    if clean:
        speculative.complete(optimizer.step)
    else:
        speculative.give_back()
        assert everything(optimizer) == before
        optimizer.step()
    assert everything(optimizer) == everything(synchronous)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and steps each parameter by that: as fused optimizers do.

    Args:
        parameters: a list for each group.
        always: whether it counts where a group has no parameters, too.
    """

    def __init__(self, parameters, always):
        super().__init__([{'params': some} for some in parameters], lr=0.1)
        self.always, self.steps = always, 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group['params'] or self.always:
                group['step'] = group.get('step', 0) + 1
            for parameter in group['params']:
                if parameter.grad is not None:
                    self.steps += 1
                    parameter.add_(parameter.grad, alpha=group['step'])


@pytest.mark.parametrize('always', [True, False])
@pytest.mark.parametrize('kept_bytes', [0, 512, 1024, 1536, 4096])
def test_counts_of_groups(kept_bytes, always):
    """They are those of a step of all, in whatever group what is stepped later may be."""
    optimizers = []
    for _ in range(2):
        one, two, three = parameters(3)
        empty, without = [], torch.zeros(4, requires_grad=True)
        optimizers.append(Counting([[one, two], [three], empty, [without]], always))
    own, synchronous = optimizers
    for _ in range(3):
        stepped = [p for g in own.param_groups for p in g['params'] if p.grad is not None]
        some = [Stepped(p, None) for p in stepped]
        speculative = SpeculativeStep(own, some, buffer_bytes=512, kept_bytes=kept_bytes)
        own.steps = 0
        speculative.undo()
        speculative.complete(own.step)
        assert own.steps == 3 - min(kept_bytes // 512, 3), 'what was kept is not stepped again'
        synchronous.step()
        counts = [
            [group.get('step') for group in optimizer.param_groups] for optimizer in optimizers
        ]
        assert counts[0] == counts[1]
        assert everything(own) == everything(synchronous)


def test_undone_copies():
    own = parameters(2)
    read = [p.detach().to(torch.bfloat16) for p in own]
    before = [copy.clone() for copy in read]
    speculative = SpeculativeStep(
        torch.optim.Adam(own), list(map(Stepped, own, read)), kept_bytes=1024
    )
    assert not any(map(torch.equal, read, before))
    speculative.undo()
    speculative.give_back()
    speculative.restore_copies()
    assert all(map(torch.equal, read, before))


class Allocated(TorchDispatchMode):
    """Most bytes alive at once of what was made meanwhile.

    Args:
        known: tensors that were there before.
    """

    def __init__(self, known):
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return made


@grid(count=(4, 40), kept_bytes=(0, 2 << 20))
def test_memory_is_bounded_by_the_buffers(count, kept_bytes):
    """However many parameters there are; Adam keeps twice as much for each as it is large."""
    size, buffer_bytes = 1 << 16, 3 << 20
    own = parameters(count, size)
    optimizer = torch.optim.Adam(own, foreach=False)
    optimizer.step()
    read = [p.detach().to(torch.bfloat16) for p in own]
    stepped = list(map(Stepped, own, read))
    state = [v for values in optimizer.state.values() for v in values.values()]
    with Allocated([*own, *read, *state]) as allocated:
        speculative = SpeculativeStep(optimizer, stepped, buffer_bytes, kept_bytes)
    assert speculative.kept_bytes <= kept_bytes < speculative.kept_bytes + 4 * own[0].nbytes
    assert speculative.peak_bytes <= buffer_bytes + kept_bytes
    temporary = 4 * own[0].nbytes  # of Adam itself, for one parameter
    assert speculative.peak_bytes <= allocated.peak <= speculative.peak_bytes + temporary
    assert speculative.peak_bytes > (buffer_bytes + kept_bytes) / 2


@pytest.mark.parametrize(('kept_bytes', 'steps'), [(2400, 4), (ALL, 1)])
def test_what_is_kept_is_stepped_once(kept_bytes, steps):
    """The optimizer steps all at once; of what is not kept, a part at a time and then again."""
    own = parameters(3)
    optimizer = torch.optim.Adam(own, lr=0.1)
    optimizer.step()
    pairs = [Stepped(p, torch.empty(64, dtype=torch.bfloat16)) for p in own]
    with mock.patch.object(optimizer, 'step', wraps=optimizer.step) as step:
        speculative = SpeculativeStep(optimizer, pairs, buffer_bytes=0, kept_bytes=kept_bytes)
        speculative.undo()
        speculative.complete(optimizer.step)
    assert step.call_count == steps


norms = st.floats(0, 1e6) | st.sampled_from([math.inf, math.nan])


@given(st.lists(norms, min_size=1, max_size=8), st.sampled_from([0.0, 1.0, 1e3]))
def test_ranks_ahead_are_the_first_ones(squares, clip_grad):
    """Nobody goes ahead behind one that does not."""
    prefix, went = Prefix(), []
    for square in squares:
        following = prefix.then(square, clip_grad)
        went.append(following.ahead > prefix.ahead)
        prefix = following
    assert went == sorted(went, reverse=True)
    assert prefix.ahead == sum(went)
    if all(went):
        assert is_clean(math.sqrt(sum(squares)), clip_grad) or clip_grad


@given(st.floats(0, 100, width=32), st.floats(0.01, 10))
def test_stands_as_megatron_clips(norm, clip_grad):
    assert is_clean(norm, clip_grad) == (not clip_grad / (norm + 1.0e-6) < 1.0)


@given(st.floats(0, width=32))
def test_a_norm_gives_its_sum_of_squares_back(total):
    """`updates` gets the root of a float32 and reduces the float32 itself."""
    import torch

    root = total**0.5
    assert torch.tensor([root * root], dtype=torch.float32).item() == total


def run(policy, outcomes):
    """Where it is engaged: a letter for each step, and for outcomes that are clean."""
    states = ''
    for clean in outcomes:
        states += 'x' if policy.engaged else '.'
        policy.after(clean == 'x')
    return states


@pytest.mark.parametrize(
    ('policy', 'outcomes', 'engaged'),
    [
        (EarlyStepPolicy(3), 'xx.xxxx', '......x'),  # after clean steps in a row
        (EarlyStepPolicy(2, window=4, tolerated=1), 'xx.x.xxx', '..xxx..x'),  # frequent clipping
        (EarlyStepPolicy(1, window=4, tolerated=1), 'x' + 5 * '.xxx', '.' + 20 * 'x'),  # rare
    ],
)
def test_steps_early_after_clean_steps(policy, outcomes, engaged):
    assert run(policy, outcomes) == engaged


def test_goes_on_and_ends():
    """Steps that overflow on the first rank, whose state all ranks behind it know."""
    policy = EarlyStepPolicy(0, window=4, tolerated=1)
    for _ in range(20):
        policy.after(clean=False, early=False)
    assert policy.engaged, 'nothing was taken back'
    for _ in range(2):
        policy.after(clean=False, early=True)
    assert not policy.engaged
    policy = EarlyStepPolicy(1)
    policy.after(True)
    for redone in (True, True, False, True, True):
        policy.after_iteration(redone)
    assert policy.engaged, 'not three in a row'
    policy.after_iteration(True)
    assert policy.ended
    assert run(policy, 20 * 'x') == 20 * '.', 'it does not begin again'


# ---- The iterator gives what its source gives, whatever is wound back.


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=20))
def test_rewound_items_come_again(rounds):
    """Each round: reserve, mark, take, and perhaps take it all again."""
    replay, expected = ReplayIterator(iter(range(1000))), 0
    for reserved, taken, again in rounds:
        assert replay.reserve(reserved)
        replay.mark(keep=True)
        for _ in range(1 + again):
            assert [next(replay) for _ in range(taken)] == list(range(expected, expected + taken))
            assert replay.given == taken
            if again:
                replay.rewind()
                replay.mark(keep=False)
                again = False
        expected += taken
        replay.forget()


def test_the_end_of_the_source():
    replay = ReplayIterator(iter('ab'))
    assert not replay.reserve(3) and not replay.idle
    assert list(replay) == ['a', 'b'] and replay.idle
