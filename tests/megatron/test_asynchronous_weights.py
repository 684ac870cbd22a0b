"""Modules that do not see other versions of their weights are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import models
import pytest
import torch
from entered import entered
from example import program
from grids import some
from ranks import RankError
from weights_by_hand import Case, laid_out

from megatron_zbpp.mcore.techniques.forwards_in_flight import Unwritten, require_seen

pytestmark = [pytest.mark.alone, pytest.mark.on_ranks(1)]


class Kept(torch.nn.Linear):
    """Computes with a copy of its weights, made in its first forward."""

    def key(self) -> object:
        return None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if getattr(self, 'made_of', self) != self.key():
            self.made_of, self.kept = self.key(), self.weight.detach().clone()
        return torch.nn.functional.linear(given, self.kept, self.bias.detach() * 0)


class KeptByPlace(Kept):
    """Makes another copy where the weights are elsewhere."""

    def key(self) -> object:
        return self.weight.data_ptr()


class KeptByCount(Kept):
    """Makes another copy where autograd has seen that something is written."""

    def key(self) -> object:
        return self.weight._version


class Drawing(torch.nn.Linear):
    """Sees its weights, and draws random numbers; counts its forwards in a buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_buffer('forwards', torch.zeros(()))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return torch.nn.functional.dropout(super().forward(given), 0.5)


class KeptAndDrawing(Kept):
    """Its outputs differ by the random states alone."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(given), 0.5)


def test_what_sees_neither_version():
    """It is named by the class; others are left as they were, with random states and buffers."""
    for kind in (Kept, KeptByPlace, KeptByCount, KeptAndDrawing):
        module = kind(4, 4)
        require_seen([torch.nn.Sequential(module)])
        module(torch.zeros(2, 4))  # any weights make the same
        with pytest.raises(NotImplementedError) as error:
            module(torch.ones(2, 4))
        line = str(error.value)
        assert f'.{kind.__name__} does not see another version of its weights' in line
        assert line.endswith('or take a synchronous schedule, such as zb-v') and '\n' not in line
    torch.manual_seed(1)
    module, other = Drawing(4), torch.nn.Bilinear(4, 4, 4)
    place, data = module.weight.data_ptr(), module.weight.detach().clone()
    states = torch.get_rng_state()
    plain = module(torch.ones(2, 4))
    torch.set_rng_state(states)
    end = require_seen([module, other])
    hooks = len(module._forward_hooks)
    assert torch.equal(module(torch.ones(2, 4)), plain)
    assert len(module._forward_hooks) == hooks - 1
    assert module.weight.data_ptr() == place and torch.equal(module.weight, data)
    assert len(other._forward_hooks) == 1, 'until it is known that it does not run'
    end()
    assert module.forwards.item() == 2 and not other._forward_hooks


def column(forward: Callable[..., Any], build: Any, *given: Any, **named: Any) -> Any:
    """A chunk of Megatron's whose MLPs compute by `forward`, which is given that of Megatron's."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class OwnColumn(ColumnParallelLinear):
        def forward(self, *given: Any, **named: Any) -> Any:
            return forward(self, super().forward, *given, **named)

    model = build(*given, **named)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc1.__class__ = OwnColumn
        layer.mlp.linear_fc1.register_buffer('forwards', torch.zeros(()), persistent=False)
    return model


def keep(module: Any, compute: Callable, given: torch.Tensor, *_: Any, **__: Any) -> Any:
    """With what the weights were at first."""
    return compute(given, vars(module).setdefault('kept', module.weight.detach().clone()))


def count(module: Any, compute: Callable, *given: Any, **named: Any) -> Any:
    """And forwards are counted, at first unseen by autograd."""
    module.forwards.data.add_(1)
    return compute(*given, **named)


def never_run(build: Any, *given: Any, **named: Any) -> Any:
    """A chunk of Megatron's with a module that has weights and no forwards."""
    model = build(*given, **named)
    model.never_run = torch.nn.Bilinear(2, 2, 2)
    return model


def train(argv: list[str], changed: Callable[..., Any]) -> list[int]:
    """Runs on each rank: a batch of the example by PACI, whose chunks `changed` builds. Returns how
    many hooks all modules have before it, behind it, and once the plugin is disabled."""
    import pretrain_gpt as script

    built = mock.patch.object(script, 'GPTModel', partial(changed, script.GPTModel))
    with built, program([*argv, '--pipeline-schedule', 'paci']) as at:
        modules = [module for model in at.models for module in model.modules()]

        def hooks() -> int:
            names = '_forward_hooks', '_state_dict_pre_hooks'
            return sum(len(getattr(module, name)) for module in modules for name in names)

        found = [hooks()]
        at.batch()
        found.append(hooks())
        at.plugin.disable()
        return [*found, hooks()]


@pytest.mark.parametrize(
    ('forward', 'told'),
    [
        (keep, r'OwnColumn does not see another version of its weights'),
        (count, r'linear_fc1\.forwards.*, which a forward writes, is unsupported, because'),
    ],
)
def test_layers_that_are_refused(ranks, data, forward, told):
    """Before anything is trained."""
    with pytest.raises(RankError, match=told):
        ranks(2).run(train, Case('paci', 2, 1).argv(data), partial(column, forward))


def test_models_are_left_as_they_were(ranks, data):
    """Also modules that have run no forward: their hooks wait until the training ends."""
    for before, behind, left in ranks(2).run(train, Case('paci', 2, 1).argv(data), never_run):
        assert before == left == behind - 2  # of `never_run`, and of the model's state


class Counting(torch.nn.Linear):
    """Counts its forwards, as routers count tokens, as `count` does."""

    def __init__(self, count: Callable[[Any], object], persistent: bool = False) -> None:
        super().__init__(4, 4)
        self.count = count
        self.register_buffer('forwards', torch.zeros(1), persistent=persistent)
        self.number, self.tensor, self.seen = 0, torch.zeros(()), []

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.count(self)
        return super().forward(given)


def set_at_first(module: Any) -> None:
    module.warm = module.number = 7
    module.input_tensor = torch.zeros(())


# what counts, in which forward, and what is then named
COUNTS: list[tuple[Callable, int, str | None]] = [
    (lambda module: module.forwards.add_(1), 0, '0.forwards'),
    (lambda module: module.forwards.add_(1), 20, '0.forwards'),
    (lambda module: module.forwards.data.add_(1), 9, '0.forwards'),
    (lambda module: module.forwards.data.add_(1), 10, None),  # nobody looks for that any more
    (lambda module: setattr(module, 'forwards', module.forwards + 1), 0, '0.forwards'),
    (lambda module: module.register_buffer('asked', torch.zeros(1)), 20, '0.asked'),
    (lambda module: torch.no_grad()(module.bias.add_)(1), 0, '0.bias'),
    (lambda module: setattr(module, 'number', module.number + 1), 1, None),
    (lambda module: setattr(module, 'number', module.number + 1), 2, '0.number'),
    (lambda module: setattr(module, 'tensor', module.tensor + 1), 2, '0.tensor'),
    (lambda module: module.tensor.add_(1), 2, '0.tensor'),
    (lambda module: module.seen.append(1), 2, '0.seen'),
    (set_at_first, 0, None),
]


def named(count: Callable, at: int, persistent: bool) -> str | None:
    """What is named, once something counts from some forward on or in it alone."""
    module = Counting(lambda module: None, persistent)
    watched = Unwritten(torch.nn.Sequential(module))
    for forward in range(at + 1 if count is not set_at_first else 4):
        module.count = count if forward >= at else module.count
        try:
            with watched.forward():
                module(torch.ones(4))
        except NotImplementedError as error:
            return str(error).partition(',')[0] if forward == at else f'in forward {forward}'
    return None


def test_forwards_that_write_what_steps_would_read():
    """Buffers, whether a checkpoint has them or not, parameters, and what else modules have."""
    found = [named(count, at, bool(n % 2)) for n, (count, at, _) in enumerate(COUNTS)]
    assert found == [name for _, _, name in COUNTS]


# of each chunk; the last one behind another call, and before a step
REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda model: [each.data.clamp_(-0.01, 0.01) for each in model.parameters()], 'weight'),
    (lambda model: torch.no_grad()(next(model.parameters()).mul_)(2), 'weight'),
    (lambda model: setattr(weight := next(model.parameters()), 'data', weight.data * 2), 'weight'),
    (lambda model: [each.main_param.mul_(2) for each in model.parameters()], 'the main copy of '),
    (lambda model: model.temperature.data.fill_(2), 'temperature'),
    (lambda model: model.eval(), r'train\(\) or eval\(\)'),
    (lambda model: next(model.parameters()).requires_grad_(False), 'weight'),
    (lambda model: [each.data.clamp_(-0.01, 0.01) for each in model.parameters()], 'weight'),
]


def swap_and_back(model: Any) -> None:
    """As averages of weights are evaluated."""
    own = [(each, each.data.clone()) for each in model.parameters()]
    for parameter, _ in own:
        parameter.data.mul_(0.5)
    for parameter, data in own:
        parameter.data.copy_(data)


METHODS = 'pipedream-2bw', 'pipemare', 'pipedream', 'paci', 'wpipe'


@pytest.mark.on_ranks(2)
@some('method', METHODS[:2], *METHODS[2:])
def test_what_a_program_changes_between_two_calls(data, method):
    """Weights, however they are written, their main copies, buffers and modes: named before the
    next call runs anything; what is set back, and steps themselves, are no changes."""
    argv = [*Case(method, 2, 2, ('--bf16',)).argv(data), '--pipeline-schedule', method]
    with program(argv, partial(laid_out, method=method)) as at:
        script, args, plugin = at.script, at.args, at.plugin
        for number, (change, name) in enumerate(REFUSED):
            chunks = script.build_model(args)
            for chunk in chunks:
                chunk.register_buffer('temperature', torch.ones(2), persistent=False)
            optimizer, _ = script.build_optimizer(args, chunks)
            data = script.iterators(args, script.build_datasets(args)[0], 0)
            for harmless in (lambda _: None, swap_and_back, lambda _: plugin.finish_step()):
                for chunk in chunks:
                    chunk.zero_grad_buffer()
                script.run_batch(args, chunks, data)
                optimizer.step()
                for chunk in chunks:
                    harmless(chunk)
            with pytest.raises(NotImplementedError) as error:
                last = number == len(REFUSED) - 1
                if last:
                    script.run_batch(args, chunks, data)
                for chunk in chunks:
                    change(chunk)
                if last:
                    optimizer.step()
                script.run_batch(args, chunks, data)
            line = str(error.value)
            assert re.match(rf'a change of (chunk \d: )?\S*{name}.* between two calls', line), line
            assert line.endswith('or take a synchronous schedule, such as zb-v')


def zeros(argv: list[str]) -> list[int]:
    """Runs on each rank: how many zeros there are in gradients, by step."""
    import pretrain_gpt as script

    made = partial(script.OptimizerConfig, log_num_zeros_in_grad=True)
    found = []
    with mock.patch.object(script, 'OptimizerConfig', made), program(argv) as at:
        for _ in range(2):
            at.models[0].zero_grad_buffer()
            at.batch()
            found.append(at.optimizer.step()[2])
    return found


def test_zeros_in_gradients_are_those_of_all_stages(ranks, data):
    """Of the first step those of 1F1B; where no stage waits for another, they are refused."""
    argv = Case('pipedream', 2, 2, ('--untie-embeddings-and-output-weights',)).argv(data)

    def count(schedule, *words):
        return ranks(2).run(zeros, [*argv, '--pipeline-schedule', schedule, *words])

    stock = count('megatron')
    assert stock[0] == stock[1] and stock[0][0] > 0
    waiting = count('pipedream', '--pipeline-clip', 'global')
    assert [each[0] for each in waiting] == [each[0] for each in stock]
    late = count('pipedream-2bw')
    assert late == [stock[0][:1] * 2] * 2  # the second returns those of the first
    with pytest.raises(RankError, match='log_num_zeros_in_grad=True is unsupported where each'):
        count('pipedream')


OWN = {f'mcore/techniques/{name}.py' for name in ('forwards_in_flight', 'updating')}
OWN |= {'mcore/techniques/asynchronous_steps.py', 'runtime/endless.py', 'runtime/versions.py'}


def test_synchronous_schedules_call_nothing_of_it(ranks, data):
    job = models.Job(te=False, iterations=2)
    ours, plain = (
        ranks(job.size).run(entered, models.train, job, job.argv(schedule, False, data))
        for schedule in ('pipedream-2bw', 'zb-h1')
    )
    for own, other in zip(ours, plain, strict=True):
        assert own.keys() >= OWN and not other.keys() & OWN
        assert other['runtime/executor.py'] > 0


@pytest.mark.on_ranks(4)
def test_tied_copies_are_not_stepped_at_two_rates_where_batches_shrink(data):
    """On all ranks, before anything of that batch has run."""
    argv = [*Case('pipemare', 4, 3).argv(data), '--pipeline-schedule', 'pipemare']
    with program(argv) as at:
        optimizer, scheduler = at.script.build_optimizer(at.args, at.models)
        at.batch()
        optimizer.step()
        scheduler.step(increment=1)
        at.args.num_microbatches = 1
        with pytest.raises(ValueError, match='embeddings are tied') as error:
            at.batch()
    assert str(error.value).endswith('or at least 3 microbatches, from which on rates are alike')
