"""Compare the layers that were built with the schedule's stages, before a model's first pass.

A class that ignores where the schedule has its stages would train another model without a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.layout import StageLayout

# a layer of a stack, as Megatron numbers it; those of multi-token prediction are numbered anew
_LAYER = re.compile(r'(?P<stack>.*\blayers)\.\d+')
_MTP = re.compile(r'\bmtp\b')


def require_all_layers(
    models: Sequence[torch.nn.Module],  # the chunks of this rank, unwrapped
    placement: Placement,  # of the stages
    pp_group: dist.ProcessGroup,  # its ranks
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

    Raises:
        ValueError: on all ranks, if a layer is missing, there twice or in another stage.
        NotImplementedError: on all ranks, what `require` raised on one.
    """
    held = placement.stages(pp_group.rank())
    own = {
        stage: (numbered_layers(model), _planned(model, placement, stage), _error(model, require))
        for stage, model in zip(held, models, strict=True)
    }
    with collective('comparison of the layers that were built'):
        by_rank: list[Any] = [None] * placement.num_ranks
        dist.all_gather_object(by_rank, own, group=pp_group)
    by_stage = dict(sorted(pair for stages in by_rank for pair in stages.items()))
    for _, _, error in by_stage.values():
        if error is not None:
            raise error
    stacks = {stack for layers, _, _ in by_stage.values() for stack in layers}
    for stack in sorted(stacks):
        found = [layers.get(stack, []) for layers, _, _ in by_stage.values()]
        planned = [numbers for _, numbers, _ in by_stage.values()]
        if placement.is_loop:
            _require_layout(stack, found, planned)
        else:
            _require_model_order(stack, found, placement)


def _require_layout(stack: str, found: list[list[int | None]], planned: list[range | None]) -> None:
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
    for built in (once, list(map(_in_place, found))):
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


def _in_place(numbers: list[int | None]) -> list[int]:
    """Give a layer that runs again the number of the one in whose place it is."""
    found: list[int] = []
    for number in numbers:
        found.append(found[-1] + 1 if number is None else number)
    return found


def _planned(model: torch.nn.Module, placement: Placement, stage: int) -> range | None:
    """Return the numbers of the layers that the layout has in a stage; None: there is no layout."""
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
        config: Any = getattr(module, 'config', None)
        divided = getattr(config, 'pipeline_model_parallel_layout', None) is not None
        if (
            divided
            and isinstance(module, TransformerBlock)
            and config.pipeline_model_parallel_size == 1
        ):
            return ValueError(
                f'{name} is whole, but its config has pipeline_model_parallel_layout, by which '
                f'Megatron built {len(module.layers)} of its {config.num_layers} layers: give a '
                'number of layers that divides among the ranks, or '
                '--decoder-first-pipeline-num-layers'
            )
    return None


def numbered_layers(model: torch.nn.Module) -> dict[str, list[int | None]]:
    """Return the numbers of the layers in each stack of `model`, in their order.

    None stands for a layer that is in the stack before, and runs again.
    """
    stacks: defaultdict[str, list[int | None]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        found, number = _LAYER.fullmatch(name), getattr(module, 'layer_number', None)
        if found and isinstance(number, int) and not _MTP.search(name):
            stack = found['stack']
            stacks[stack].append(None if (stack, id(module)) in seen else number)
            seen.add((stack, id(module)))
    return dict(stacks)
