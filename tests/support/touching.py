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

import torch
from injected import run

NOW_AND_THEN = 3  # so often a program touches that does not in each iteration


@dataclass
class Program:
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
    places = dict.fromkeys(('start', 'between', 'before', 'backward'), lambda at: None)
    functions = {**places, 'evaluation': contextlib.nullcontext, **PROGRAMS[program]}
    build_model, build_optimizer = pretrain_gpt.build_model, pretrain_gpt.build_optimizer
    run_batch, evaluate = pretrain_gpt.run_batch, pretrain_gpt.evaluate

    def building(args):
        at.models = build_model(args)
        return at.models

    def optimizing(args, models):
        at.optimizer, scheduler = build_optimizer(args, models)
        functions['start'](at)
        return at.optimizer, scheduler

    def running(args, models, data, **options):
        if options.get('forward_only'):
            return run_batch(args, models, data, **options)
        if at.iteration:
            functions['between'](at)
        functions['before'](at)
        loss = run_batch(args, models, data, **options)
        functions['backward'](at)
        at.iteration += 1
        return loss

    def evaluating(*args):
        with functions['evaluation'](at):
            return evaluate(*args)

    own = {'build_model': building, 'build_optimizer': optimizing}
    own |= {'run_batch': running, 'evaluate': evaluating}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        plugins = run(argv, 1 if early else False, variant, own, metrics)
    done = plugins[-1].post_validation if plugins else None
    counts = (done.early, done.redone) if done else (0, 0)
    heard = said.getvalue() if plugins else ''
    return Done(*counts, heard, tuple(json.dumps(each) for each in at.read))


def now_and_then(function: Callable) -> Callable:
    def program(at: Program) -> None:
        if at.due:
            function(at)

    return program


def of_each(change: Callable, chosen: str = '') -> Callable:
    """Change each parameter; or those of a layer, on the one rank that holds it."""

    def program(at: Program) -> None:
        for name, parameter in at.parameters():
            if chosen in f' {name} ':
                change(parameter)

    return program


def of_data(change: Callable, chosen: str = '') -> Callable:
    return now_and_then(of_each(change, chosen))


def each(*functions: Callable) -> Callable:
    def program(at: Program) -> None:
        for function in functions:
            function(at)

    return program


@torch.no_grad()
def clamp(parameter: Any) -> None:
    parameter.clamp_(-0.03, 0.03)


def clamp_data(parameter: Any) -> None:
    parameter.data.clamp_(-0.03, 0.03)


@torch.no_grad()
def decay(at: Program) -> None:
    """Each time: an optimizer of the program's own."""
    torch._foreach_mul_([parameter for _, parameter in at.parameters()], 0.99)


def reseed(at: Program) -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.manual_seed(at.iteration)
    tensor_parallel.model_parallel_cuda_manual_seed(
        at.iteration + parallel_state.get_pipeline_model_parallel_rank()
    )


def draw(at: Program) -> None:
    """Random numbers of the program's own, which it would else draw twice."""
    at.read.append(torch.rand(2).tolist())


@contextlib.contextmanager
def average(at: Program) -> Iterator[None]:
    """Evaluates with means of the weights, copied in and out."""
    parameters = dict(at.parameters())
    with torch.no_grad():
        shadows = at.kept.setdefault('means', {})
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
    with average(at):
        at.read.append(len(at.kept))


def swap_alone(at: Program) -> None:
    """The same by other memory, and the old one again."""
    own = {name: parameter.data for name, parameter in at.parameters()}
    for _, parameter in at.parameters():
        parameter.data = parameter.data * 0.9
    for name, parameter in at.parameters():
        parameter.data = own[name]


def log_norms(at: Program) -> None:
    at.read.append({name: p.main_grad.norm().item() for name, p in at.parameters()})


def clip(parameter: Any) -> None:
    gradient = parameter.main_grad
    gradient.mul_((0.01 / (gradient.norm() + 1e-6)).clamp(max=1))


def add_noise(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.detach().float().sign(), alpha=1e-3)


def fill(parameter: Any) -> None:
    """A gradient of the program's own, before the iteration begins."""
    parameter.main_grad.add_(parameter.detach().float(), alpha=1e-2)


def set_rate(at: Program) -> None:
    for group in at.optimizer.param_groups:
        group['lr'] = 1e-3 / (at.iteration + 1)


def forget_moments(at: Program) -> None:
    """What a program does that starts the optimizer anew now and then."""
    for part in getattr(at.optimizer, 'chained_optimizers', [at.optimizer]):
        for state in part.optimizer.state.values():
            state['exp_avg'].zero_()


def halve(parameter: Any) -> None:
    parameter.register_hook(lambda gradient: gradient * 0.5)


def late_hook(at: Program) -> None:
    if at.iteration == NOW_AND_THEN:
        of_each(halve)(at)


def accumulated(at: Program) -> None:
    counts = at.kept.setdefault('counts', {})

    def count(name: str, _: Any) -> None:
        counts[name] = counts.get(name, 0) + 1

    for name, parameter in at.parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(count, name))


def told(at: Program) -> None:
    at.read.append(dict(sorted(at.kept['counts'].items())))


# by name: what each does, when
WEIGHTS: dict[str, dict[str, Callable]] = {
    'clamp in place': {'between': of_data(clamp)},
    'clamp through data': {'between': of_data(clamp_data)},
    'weight decay each time': {'between': decay},
    'averages in evaluation': {'evaluation': average},
    'averages': {'between': now_and_then(average_alone)},
    'clamp the first layer': {'between': of_data(clamp_data, ' 1.')},
    'gradients before, clamp': {'before': each(of_each(fill), of_data(clamp_data))},
}
MORE_WEIGHTS: dict[str, dict[str, Callable]] = {
    'clamp the last layer': {'between': of_data(clamp_data, ' 4.')},
    'averages, other memory': {'between': swap_alone},
}
HOOKS = {'start': each(of_each(halve), accumulated), 'between': late_hook, 'backward': told}
OTHERS: dict[str, dict[str, Callable]] = {
    'gradients': {'backward': each(log_norms, of_each(clip), of_each(add_noise))},
    'learning rates and moments': {'between': each(set_rate, now_and_then(forget_moments))},
    'hooks': HOOKS,
    'random numbers': {'between': draw},
    'random states': {'between': now_and_then(reseed)},
    'gradients before': {'before': of_each(fill)},
}
PROGRAMS = {**WEIGHTS, **MORE_WEIGHTS, **OTHERS}
