"""A speculative step leaves the optimizer as it was, and the model as a step would."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from grids import grid
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

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
