"""What a program writes to weights is noticed, by whichever way it goes."""

import itertools
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_zbpp.mcore.optimizer import early_steps
from megatron_zbpp.mcore.settings import Settings
from megatron_zbpp.post_validation import watch
from megatron_zbpp.post_validation.data_iterators import SharedIterators
from megatron_zbpp.post_validation.watch import Watch, Watched, any_bits, digest, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd

# what the host sees each time: counters, addresses, settings
SEEN = {
    'clamp_': lambda p, flat: p.clamp_(-0.1, 0.1), 'copy_': lambda p, flat: p.copy_(p * 2),
    'detach().mul_': lambda p, flat: p.detach().mul_(2),
    'foreach': lambda p, flat: torch._foreach_mul_([p], 0.5),
    'optimizer': lambda p, flat: stepped(torch.optim.SGD([p], 0.1), p),
    'load_state_dict': lambda p, flat: module_of(p).load_state_dict({'p': torch.randn(4, 10)}),
    'data = ': lambda p, flat: setattr(p, 'data', p.data * 2),
    'set_': lambda p, flat: p.set_(torch.randn(4, 10)),
    'vector_to_parameters': lambda p, flat: torch.nn.utils.vector_to_parameters(flat * 2, [p]),
    'flat buffer': lambda p, flat: flat.mul_(2),
    'part of the flat buffer': lambda p, flat: flat[3:].mul_(2),
    'requires_grad_': lambda p, flat: p.requires_grad_(False),
}  # fmt: skip
# what only values tell
HIDDEN = {
    'data.clamp_': lambda p, flat: p.data.clamp_(-0.1, 0.1),
    'data.copy_': lambda p, flat: p.data.copy_(p * 2),
    'foreach on data': lambda p, flat: torch._foreach_mul_([p.data], 0.5),
    'storage': lambda p, flat: p.untyped_storage().copy_(torch.randn(40).untyped_storage()),
    'numpy': lambda p, flat: p.detach().numpy().__imul__(2),
    'rows in another order': lambda p, flat: p.data.copy_(p.data.flip(0)),
    'columns in another order': lambda p, flat: p.data.copy_(p.data.flip(1)),
    'one bit': lambda p, flat: p.data.view(-1).view(torch.int32)[-1:].bitwise_xor_(1),
    'its sign': lambda p, flat: p.data.neg_(),
}


def stepped(optimizer, parameter):
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def module_of(parameter):
    module = torch.nn.Module()
    module.p = parameter
    return module


def watching(hashed=True):
    """A parameter that is a view of a flat buffer, as DDP's are, watched."""
    flat = torch.randn(40)
    parameter = torch.nn.Parameter(torch.empty(4, 10))
    parameter.data = flat.view(4, 10)
    watched = Watched([module_of(parameter)], [('the buffer', flat)])
    return parameter, flat, Watch(watched, hashed, unseen_by_autograd)


@pytest.mark.parametrize('write', SEEN)
def test_seen_each_time(write):
    parameter, flat, watch = watching(hashed=False)
    assert not watch.changes()
    with torch.no_grad():
        SEEN[write](parameter, flat)
    assert watch.changes() == ['the buffer' if 'buffer' in write else 'p']


@pytest.mark.parametrize('write', HIDDEN)
def test_seen_by_values_only(write):
    parameter, flat, watch = watching()
    HIDDEN[write](parameter, flat)
    assert not watch.changes(), 'values need not be looked at'
    assert watch.differ() and watch.different() == ['p']


def test_nothing_is_seen_of_reading():
    parameter, flat, watch = watching()
    parameter.norm().item(), parameter.clone(), flat.sum(), parameter.data.max()
    assert not watch.changes() and not watch.differ() and not watch.different()


@pytest.mark.parametrize('change', ['eval', 'hook'])
def test_how_modules_forward(change):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    watch = Watch(Watched([module]), False, unseen_by_autograd)
    if change == 'eval':
        module[1].eval()
    else:
        module[0].register_forward_hook(lambda *_: None)
    assert len(watch.changes()) == 1


def test_graphs_run_back_once_it_is_hidden():
    """With what they find: their result counts no longer."""
    parameter, _, watch = watching()
    loss = (torch.ones(1, 4, requires_grad=True) @ parameter).sum()
    with torch.no_grad():
        parameter.mul_(2)
    with pytest.raises(RuntimeError, match='inplace'):
        loss.backward(retain_graph=True)
    watch.hide()
    loss.backward()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize('size', [1, 3, 1000, 5000])
@pytest.mark.parametrize('offset', [0, 1])
def test_each_value_counts(dtype, size, offset):
    memory = torch.arange(offset + size).remainder(251).to(dtype)
    tensor = memory[offset:]
    before = digest(tensor).item()
    for place in {0, size // 2, size - 1}:
        tensor[place] += 1
        assert digest(tensor).item() != before
        tensor[place] -= 1
        assert digest(tensor).item() == before


@pytest.mark.parametrize('places', [(0, 64), (63, 64), (3, 6399), (6336, 6398)])
def test_what_changes_places_counts(places):
    """But within 256 bytes, as the page on loops of one's own says."""
    tensor = torch.randn(100, 64)
    before = digest(tensor).item()
    flat, (one, other) = tensor.view(-1), places
    flat[one], flat[other] = flat[other].clone(), flat[one].clone()
    assert (digest(tensor).item() != before) == (one // 64 != other // 64)


def test_bits_and_words():
    tensor = torch.full((5,), float('nan'))
    assert digest(tensor) == digest(tensor.clone())
    zeros = torch.zeros(7)
    assert not any_bits([zeros, zeros[:0], zeros[1:]])
    zeros[-1] = 1e-40
    assert any_bits([zeros])
    assert summary(['a']) == 'a'
    assert summary(['a', 'b', 'c', 'd']) == 'a, b and 2 more'


# ---- Views of one iterator, which chunks keep from iteration to iteration.


def test_each_chunk_reads_all_in_order():
    views, source = SharedIterators(), itertools.count()
    first, second = views.of(source, 2)
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    assert [next(second) for _ in range(3)] == [0, 1, 2]
    assert views.of(source, 2) == [first, second]
    assert next(first) == 3, 'run ahead, before the iteration begins'
    assert views.of(source, 2) == [first, second]
    assert [next(second), next(first), next(second)] == [3, 4, 4]
    first, second = SharedIterators().of(iter([1]), 2)
    assert list(first) == list(second) == [1]
    assert SharedIterators().of(None, 2) == [None, None]


def test_what_all_have_read_is_forgotten():
    class Item:
        pass

    views, source = SharedIterators(), (Item() for _ in range(9))
    first, second, idle = views.of(source, 3)
    seen = [weakref.ref(next(first)) for _ in range(4)]
    assert [next(second) for _ in range(2)] == [each() for each in seen[:2]]
    views.of(source, 3)
    assert [each() is None for each in seen] == [True, True, False, False]
    with pytest.raises(RuntimeError, match='leave out post_validation'):
        next(idle)


def test_other_sources_have_others():
    views = SharedIterators()
    one, other = iter([1, 2]), iter([3, 4])
    (first,) = views.of(one, 1)
    assert next(first) == 1
    assert [next(view) for view in views.of(other, 1)] == [3]
    assert next(first) == 2
    for _ in range(9):
        views.of(iter([0]), 1)
    assert views.of(one, 1) != [first], 'few are kept'


# ---- Behind which early steps values of weights are compared, and how much old state one keeps.


@pytest.mark.parametrize(
    ('every', 'later'), [(0, []), (1, list(range(10, 40))), (10, [10, 20, 30]), (15, [15, 30])]
)
def test_steps_behind_which_values_are_compared(every, later):
    session = SimpleNamespace(settings=Settings(post_validation=1, check_interval=every))
    watching_ = early_steps.Watching(session)
    found = []
    for step in range(40):
        watching_._steps = step
        if watching_._hashes:
            found.append(step)
    assert found == [*range(10), *later]


@pytest.mark.parametrize('hashed', [False, True])
def test_passes_over_weights(monkeypatch, hashed):
    """None where values are not compared; two where they are."""
    counted = []
    digest = watch.digest
    monkeypatch.setattr(watch, 'digest', lambda t: counted.append(t) or digest(t))
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    looking = watch.Watch(watch.Watched([module]), hashed, early_steps.unseen_by_autograd)
    looking.changes()
    looking.differ()
    tensors = [*module.parameters(), *module.buffers()]
    assert len(counted) == 2 * len(tensors) * hashed


# How much old state an early step keeps, of the memory that there is.


BYTES = {'memory_allocated': 7, 'memory_reserved': 60, 'max_memory_allocated': 50}
BYTES |= {'mem_get_info': (10, 100)}


@pytest.mark.parametrize(
    ('share', 'limit', 'expected'), [(1.0, None, 13), (0.5, None, 35), (0.5, 20 / 2**30, 20)]
)
def test_an_early_step_keeps_what_there_is_memory_for(share, limit, expected):
    """Of 63 bytes that are free 56 can be used, and passes have needed 43: those ahead a share."""
    answers = {name: lambda device, value=value: value for name, value in BYTES.items()}
    with mock.patch.object(early_steps, 'KEPT_BYTES', 0):
        with mock.patch.multiple(torch.cuda, **answers):
            assert early_steps.most_kept(torch.device('cuda', 1), share, limit) == expected
        assert early_steps.most_kept(torch.device('cpu'), share, limit) == 0
    assert early_steps.most_kept(torch.device('cpu'), share, None) == early_steps.KEPT_BYTES
