"""Checks of a model: its layers before the first pass, its weight gradients in the first iteration.

A class that ignores where the schedule has its stages, or a layer that loses its weight gradient,
would train another model without a word.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.layers import transformer_engine
from megatron_zbpp.mcore.layers.linear import ADDED
from megatron_zbpp.mcore.layout import StageLayout
from megatron_zbpp.runtime.log import rank_log
from megatron_zbpp.runtime.weight_grads import WeightGradStore

# a layer of a stack, as Megatron numbers it; those of multi-token prediction are numbered anew
_LAYER = re.compile(r'(?P<stack>.*\blayers)\.\d+')
_MTP = re.compile(r'\bmtp\b')


def require_all_layers(
    models: Sequence[torch.nn.Module],  # the chunks of this rank, unwrapped
    placement: Placement,
    pp_group: dist.ProcessGroup,
    collective: Callable[[str], AbstractContextManager],  # around what waits for other ranks
    require: Sequence[Callable[[torch.nn.Module], None]] = (),
) -> None:
    """Check that every class built its layers where the schedule has its stages: a collective.

    In a loop stages are where Megatron's own schedules have them, so that whatever was built
    trains as by those: layers that run twice, were pruned or have numbers of their own. A class
    that ignores a layout is found there by counts and numbers that are both others. Elsewhere each
    stack has to be the layers 1 to n in model order; one that runs again counts once, or in place
    of the layer that it stands for. Models whose layers have no numbers, which are not Megatron's,
    pass.
    """
    own = {
        stage: (numbered_layers(model), _planned(model, placement, stage), _error(model, require))
        for stage, model in zip(placement.stages(pp_group.rank()), models, strict=True)
    }
    with collective('comparison of the layers that were built'):
        by_rank: list[Any] = [None] * placement.num_ranks
        dist.all_gather_object(by_rank, own, group=pp_group)
    by_stage = dict(sorted(pair for stages in by_rank for pair in stages.items()))
    layers, planned, errors = zip(*by_stage.values(), strict=True)
    if error := next(filter(None, errors), None):
        raise error
    for stack in sorted({stack for stacks in layers for stack in stacks}):
        found = [stacks.get(stack, []) for stacks in layers]
        if placement.is_loop:
            _require_layout(stack, found, planned)
        else:
            _require_model_order(stack, found, placement)


def _require_layout(
    stack: str, found: list[list[int | None]], planned: Sequence[range | None]
) -> None:
    pairs = [(own, numbers) for own, numbers in zip(found, planned, strict=True) if numbers]
    counts = all(len(own) == len(numbers) for own, numbers in pairs)
    if counts or all({*own} - {None} <= {*numbers} for own, numbers in pairs):
        return
    raise ValueError(
        f'the layers of {stack} were not built by pipeline_model_parallel_layout: by stage '
        f'{list(map(_once, found))}; let the model take its layers from there, or give a number '
        'of layers that divides among the ranks, without a layout'
    )


def _require_model_order(stack: str, found: list[list[int | None]], placement: Placement) -> None:
    """Raise ValueError unless the stages, in model order, have the layers 1 to n."""
    once, ranks = list(map(_once, found)), placement.only_route
    in_place: list[list[int]] = []  # a layer that runs again has the number of its place
    for numbers in found:
        in_place.append([])
        for number in numbers:
            in_place[-1].append(in_place[-1][-1] + 1 if number is None else number)
    for built in (once, in_place):
        flat = [number for numbers in built for number in numbers]
        if flat == list(range(1, len(flat) + 1)):
            return
    raise ValueError(
        f'the layers of {stack} were not built where the schedule has its stages, or not all of '
        f'them: by stage {once}, in ranks {ranks}; let the model take its layers from '
        'pipeline_model_parallel_layout, or take a schedule whose stages go around the ranks once, '
        'such as zb-h1, for layers that are pruned or have other numbers than 1 to n'
    )


def _once(numbers: list[int | None]) -> list[int]:
    """Leave out the layers that run again."""
    return [number for number in numbers if number is not None]


def _planned(model: torch.nn.Module, placement: Placement, stage: int) -> range | None:
    """Return the numbers of the layers that the layout has in a stage; None: no layout."""
    config: Any = getattr(model, 'config', None)
    plan = getattr(config, 'pipeline_model_parallel_layout', None)
    if not isinstance(plan, StageLayout) or plan.placement != placement:
        return None
    before = sum(plan.num_layers[:stage])
    return range(before + 1, before + 1 + plan.num_layers[stage])


def _error(
    model: torch.nn.Module, require: Sequence[Callable[[torch.nn.Module], None]]
) -> Exception | None:
    try:
        for each in require:
            each(model)
    except NotImplementedError as error:
        return NotImplementedError(str(error))  # to be sent, without its traceback
    for name, module in model.named_modules():
        if not isinstance(module, TransformerBlock):
            continue
        config: Any = module.config
        divided = getattr(config, 'pipeline_model_parallel_layout', None) is not None
        if divided and config.pipeline_model_parallel_size == 1:
            return ValueError(
                f'{name} is whole, but its config has pipeline_model_parallel_layout, by which '
                f'Megatron built {len(module.layers)} of its {config.num_layers} layers: give a '
                'number of layers that divides among the ranks, or '
                '--decoder-first-pipeline-num-layers'
            )
    return None


def numbered_layers(model: torch.nn.Module) -> dict[str, list[int | None]]:
    """Return the numbers of layers in each stack, in order; None: a layer that runs again."""
    stacks: defaultdict[str, list[int | None]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        found, number = _LAYER.fullmatch(name), getattr(module, 'layer_number', None)
        if found and isinstance(number, int) and not _MTP.search(name):
            stack = found['stack']
            stacks[stack].append(None if (stack, id(module)) in seen else number)
            seen.add((stack, id(module)))
    return dict(stacks)


_complete: WeakSet[torch.nn.Module] = WeakSet()  # chunks that have been looked at


@contextlib.contextmanager
def every_weight_gradient(
    models: Sequence[torch.nn.Module], store: WeightGradStore
) -> Iterator[None]:
    """Enter an iteration of training, which is looked at if it is the first of these chunks.

    A weight that autograd did not visit took no part in it: an expert without tokens, a layer that
    is not used. One that it visited got a gradient: as such, or added to `main_grad`.
    """
    models = [model for model in models if model not in _complete]
    if not models:
        yield
        return
    visits: dict[str, bool] = {}  # by name, whether autograd brought a gradient
    parameters = {
        name if len(models) == 1 else f'chunk {k}: {name}': parameter
        for k, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }

    def visit(name: str, gradient: torch.Tensor | None) -> None:
        visits[name] = visits.get(name, False) or gradient is not None

    with contextlib.ExitStack() as stack:
        for name, parameter in parameters.items():
            stack.callback(parameter.register_hook(functools.partial(visit, name)).remove)
        strays = stack.enter_context(transformer_engine.strays())
        yield
    waiting = {id(p) for model in models for p in transformer_engine.left_over(model)}
    missing = []
    for name, parameter in parameters.items():
        added = getattr(parameter, ADDED, hasattr(parameter, 'main_grad'))
        if id(parameter) in waiting or not (visits.get(name, True) or added):
            missing.append(name)
    if missing or strays:
        shapes = (' and '.join(str(tuple(s)) for s in each) for each in dict.fromkeys(strays))
        lost = ', '.join(missing) or (
            "Transformer Engine's, of layers that model.modules() does not find, from "
            + ', '.join(shapes)
        )
        raise RuntimeError(
            'weight gradients were put off in the first iteration, and no W pass computed them: '
            f"{lost}. Use layers that the schedule can split (without Transformer Engine's op "
            'fuser), or a schedule without W passes such as 1f1b; please report it'
        )
    _complete.update(models)
    if not store.used and any(p.ndim > 1 and 'embedding' not in n for n, p in parameters.items()):
        rank_log.warning(
            'rank %d: no layer left its weight gradient to a W pass, so that W passes have '
            'nothing to do: results are right, and the schedule gains nothing by them. Layers that '
            "can are Megatron's ColumnParallelLinear and RowParallelLinear, and Transformer "
            "Engine's: report it if these are",
            dist.get_rank(),
        )
