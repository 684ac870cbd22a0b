"""The example's training as a program that touches weights, gradients or state between calls."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from injected import run

NOW_AND_THEN = 3  # so often a program touches that does not in each iteration


@dataclass
class Program:
    """What the functions below find."""

    models: list = None  # the chunks of this rank
    optimizer: Any = None  # Megatron's
    iteration: int = 0  # from 0, of the training call that comes or has been
    read: list = None  # what the program has written down
    kept: dict = None  # what it keeps from call to call

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield those of the layers, by layer and name: who holds them depends on the schedule."""
        import report

        for layer, name, parameter in report.by_layer(self.models):
            yield f'{layer}.{name}', parameter

    @property
    def due(self) -> bool:
        return self.iteration % NOW_AND_THEN == NOW_AND_THEN - 1


@dataclass(frozen=True)
class Done:
    """What a rank did: of post-validation, what it says of it, and what the program has read."""

    early: int
    redone: int
    said: str
    read: tuple


def train(argv: list[str], program: str, early: bool, variant: str, *, metrics: Path) -> Done:
    """Runs on each rank: the example's `train` with one of `PROGRAMS`, a variant of `injected`."""
    import pretrain_gpt

    at = Program(read=[], kept={})
    functions = PROGRAMS[program]
    build_model, build_optimizer = pretrain_gpt.build_model, pretrain_gpt.build_optimizer
    run_batch, evaluate = pretrain_gpt.run_batch, pretrain_gpt.evaluate

    def building(args):
        at.models = build_model(args)
        return at.models

    def optimizing(args, models):
        at.optimizer, scheduler = build_optimizer(args, models)
        functions.get('start', _nothing)(at)
        return at.optimizer, scheduler

    def running(args, models, data, **options):
        if options.get('forward_only'):
            return run_batch(args, models, data, **options)
        if at.iteration:
            functions.get('between', _nothing)(at)
        functions.get('before', _nothing)(at)
        loss = run_batch(args, models, data, **options)
        functions.get('backward', _nothing)(at)
        at.iteration += 1
        return loss

    def evaluating(*args):
        with functions.get('evaluation', _around_nothing)(at):
            return evaluate(*args)

    own = {
        'build_model': building,
        'build_optimizer': optimizing,
        'run_batch': running,
        'evaluate': evaluating,
    }
    with contextlib.redirect_stderr(io.StringIO()) as said:
        plugins = run(argv, 1 if early else False, variant, own, metrics)
    done = plugins[-1].post_validation if plugins else None
    counts = (done.early, done.redone) if done else (0, 0)
    heard = said.getvalue() if plugins else ''
    return Done(*counts, heard, tuple(json.dumps(each) for each in at.read))


def _nothing(_: Program) -> None:
    pass


@contextlib.contextmanager
def _around_nothing(_: Program) -> Iterator[None]:
    yield


def _without_grad(function: Callable) -> Callable:
    @functools.wraps(function)
    def program(at: Program) -> None:
        import torch

        with torch.no_grad():
            function(at)

    return program


@_without_grad
def clamp(at: Program) -> None:
    for _, parameter in at.parameters():
        if at.due:
            parameter.clamp_(-0.03, 0.03)


def of_data(change: Callable, chosen: str = '') -> Callable:
    """Now and then, `change` of parameters' data; of a layer, on the one rank that holds it."""

    def program(at: Program) -> None:
        for name, parameter in at.parameters():
            if at.due and chosen in f' {name} ':
                change(parameter)

    return program


def _clamp_data(parameter: Any) -> None:
    parameter.data.clamp_(-0.03, 0.03)


@_without_grad
def decay(at: Program) -> None:
    """Each time: an optimizer of the program's own."""
    import torch

    torch._foreach_mul_([parameter for _, parameter in at.parameters()], 0.99)


def decay_buffers(at: Program) -> None:
    """By way of DDP's buffers, where parameters are views of them."""
    if at.due:
        for model in at.models:
            for buffer in model.buffers:
                buffer.param_data.mul_(0.99)


def replace(parameter: Any) -> None:
    """Other memory."""
    parameter.data = parameter.data * 0.99


def permute(parameter: Any) -> None:
    """Values in another order: what adds up all of them sees nothing."""
    parameter.data.copy_(parameter.data.roll(2, 0))


def prune(parameter: Any) -> None:
    """The smallest weights to zero."""
    parameter.data.mul_(parameter.data.abs() > 5e-3)


@_without_grad
def tie(at: Program) -> None:
    """Two weights of each layer that have one shape get one value."""
    if at.due:
        biases = {name: p for name, p in at.parameters() if name.endswith('.bias')}
        for name, parameter in biases.items():
            other = name.replace('linear_proj', 'linear_fc2')
            if other != name:
                parameter.copy_(biases[other.replace('self_attention', 'mlp')])


def load(at: Program) -> None:
    """The weights of two iterations ago."""
    if at.due:
        for model, state in zip(at.models, at.kept['states'], strict=True):
            model.load_state_dict(state)
    elif at.iteration % NOW_AND_THEN == 1:
        at.kept['states'] = [
            {n: v.clone() if v is not None else v for n, v in model.state_dict().items()}
            for model in at.models
        ]


def reseed(at: Program) -> None:
    import torch
    from megatron.core import parallel_state, tensor_parallel

    if at.due:
        torch.manual_seed(at.iteration)
        tensor_parallel.model_parallel_cuda_manual_seed(
            at.iteration + parallel_state.get_pipeline_model_parallel_rank()
        )


def draw(at: Program) -> None:
    """Random numbers of the program's own, which it would else draw twice."""
    import torch

    at.read.append(torch.rand(2).tolist())


@contextlib.contextmanager
def average(at: Program) -> Iterator[None]:
    """Evaluates with means of the weights, copied in and out."""
    import torch

    with torch.no_grad():
        shadows = at.kept.setdefault('means', {})
        parameters = dict(at.parameters())
        for name, parameter in parameters.items():
            shadows.setdefault(name, parameter.clone()).lerp_(parameter, 0.5)
        own = {name: parameter.clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(shadows[name])
    yield
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own[name])


def average_alone(at: Program) -> None:
    """Evaluates by itself: no call of the pipeline comes between."""
    if at.due:
        with average(at):
            at.read.append(len(at.kept))


@contextlib.contextmanager
def average_data(at: Program) -> Iterator[None]:
    """The same by other memory, and the old one again."""
    own = {name: parameter.data for name, parameter in at.parameters()}
    for _, parameter in at.parameters():
        parameter.data = parameter.data * 0.9
    yield
    for name, parameter in at.parameters():
        parameter.data = own[name]


def swap_alone(at: Program) -> None:
    with average_data(at):
        pass


def log_norms(at: Program) -> None:
    at.read.append({name: p.main_grad.norm().item() for name, p in at.parameters()})


def clip_each(at: Program) -> None:
    """Each parameter's gradient by itself."""
    for _, parameter in at.parameters():
        gradient = parameter.main_grad
        gradient.mul_((0.01 / (gradient.norm() + 1e-6)).clamp(max=1))


def noise(at: Program) -> None:
    for _, parameter in at.parameters():
        parameter.main_grad.add_(parameter.detach().float().sign(), alpha=1e-3)


def fill(at: Program) -> None:
    """A gradient of the program's own, before the iteration begins."""
    for _, parameter in at.parameters():
        parameter.main_grad.add_(parameter.detach().float(), alpha=1e-2)


def set_rate(at: Program) -> None:
    for group in at.optimizer.param_groups:
        group['lr'] = 1e-3 / (at.iteration + 1)


def forget_moments(at: Program) -> None:
    """What a program does that starts the optimizer anew now and then."""
    for part in getattr(at.optimizer, 'chained_optimizers', [at.optimizer]):
        for state in part.optimizer.state.values():
            if at.due:
                state['exp_avg'].zero_()


def hook(at: Program) -> None:
    for _, parameter in at.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)


def late_hook(at: Program) -> None:
    if at.iteration == NOW_AND_THEN:
        hook(at)


def accumulated(at: Program) -> None:
    """Counts what is accumulated."""
    counts = at.kept.setdefault('counts', {})

    def count(name: str, _: Any) -> None:
        counts[name] = counts.get(name, 0) + 1

    for name, parameter in at.parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(count, name))


def each(*functions: Callable) -> Callable:
    """Return a program that does all."""

    def program(at: Program) -> None:
        for function in functions:
            function(at)

    return program


def told(at: Program) -> None:
    at.read.append(dict(sorted(at.kept['counts'].items())))


# by name: what each does, when
WEIGHTS: dict[str, dict[str, Callable]] = {
    'clamp in place': {'between': clamp},
    'clamp through data': {'between': of_data(_clamp_data)},
    'weight decay each time': {'between': decay},
    'averages in evaluation': {'evaluation': average},
    'averages': {'between': average_alone},
    'clamp the first layer': {'between': of_data(_clamp_data, ' 1.')},
    'gradients before, clamp': {'before': each(fill, of_data(_clamp_data))},
}
MORE_WEIGHTS: dict[str, dict[str, Callable]] = {
    'weight decay of buffers': {'between': decay_buffers},
    'clamp the last layer': {'between': of_data(_clamp_data, ' 4.')},
    'other memory': {'between': of_data(replace)},
    'another order': {'between': of_data(permute, 'linear_fc1.weight ')},
    'load': {'between': load},
    'prune': {'between': of_data(prune)},
    'tie': {'between': tie},
    'averages in evaluation, other memory': {'evaluation': average_data},
    'averages, other memory': {'between': swap_alone},
}
OTHERS: dict[str, dict[str, Callable]] = {
    'gradients': {'backward': each(log_norms, clip_each, noise)},
    'learning rates and moments': {'between': each(set_rate, forget_moments)},
    'hooks': {'start': each(hook, accumulated), 'between': late_hook, 'backward': told},
    'random numbers': {'between': draw},
    'random states': {'between': reseed},
    'gradients before': {'before': fill},
}
PROGRAMS = {**WEIGHTS, **MORE_WEIGHTS, **OTHERS}
