"""Whether the layers that were built are the model's, before the first pass of a model.

A class that ignores where the schedule has its stages would train another model without a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_zbpp.ir import Placement

# a layer of a stack, as Megatron numbers it; those of multi-token prediction are numbered anew
_LAYER = re.compile(r'(?P<stack>.*\blayers)\.\d+')
_MTP = re.compile(r'\bmtp\b')


def require_all_layers(
    models: Sequence[torch.nn.Module],
    placement: Placement,
    pp_group: dist.ProcessGroup,
    collective: Callable[[str], AbstractContextManager],
) -> None:
    """Return if the stages, in model order, have the layers 1 to n of each stack: a collective.

    Models whose layers have no numbers, which are not Megatron's, pass.

    Args:
        models: the chunks of this rank, unwrapped.
        placement: of the stages.
        pp_group: its ranks.
        collective: around what waits for other ranks.

    Raises:
        ValueError: on all ranks, if a layer is missing, there twice or in another stage.
    """
    held = placement.stages(pp_group.rank())
    own = {
        stage: (numbered_layers(model), _cut(model))
        for stage, model in zip(held, models, strict=True)
    }
    with collective('comparison of the layers that were built'):
        by_rank: list[Any] = [None] * placement.num_ranks
        dist.all_gather_object(by_rank, own, group=pp_group)
    by_stage: dict[int, dict[str, list[int]]] = {}
    for stages in by_rank:
        for stage, (layers, problem) in stages.items():
            if problem is not None:
                raise ValueError(problem)
            by_stage[stage] = layers
    stacks = {stack for layers in by_stage.values() for stack in layers}
    for stack in sorted(stacks):
        found = [by_stage[stage].get(stack, []) for stage in range(placement.num_stages)]
        flat = [number for numbers in found for number in numbers]
        if flat != list(range(1, len(flat) + 1)):
            raise ValueError(
                f'the layers of {stack} were not built where the schedule has its stages: by stage '
                f'{found}, in ranks {placement.ranks}; let the model take its layers from '
                'pipeline_model_parallel_layout, or take a schedule whose stages go around the '
                'ranks once, such as zb-h1'
            )


def _cut(model: torch.nn.Module) -> str | None:
    """Return why a part that one rank has for itself, as an encoder of images, lacks layers.

    Its config may be a copy of the pipeline's model's, with that one's layout.
    """
    for name, module in model.named_modules():
        config: Any = getattr(module, 'config', None)
        divided = getattr(config, 'pipeline_model_parallel_layout', None) is not None
        if (
            divided
            and isinstance(module, TransformerBlock)
            and config.pipeline_model_parallel_size == 1
        ):
            return (
                f'{name} is whole, but its config has pipeline_model_parallel_layout, by which '
                f'Megatron built {len(module.layers)} of its {config.num_layers} layers: give a '
                'number of layers that divides among the ranks, or '
                '--decoder-first-pipeline-num-layers'
            )
    return None


def numbered_layers(model: torch.nn.Module) -> dict[str, list[int]]:
    """Return the numbers of the layers in each stack of `model`, in their order."""
    stacks: defaultdict[str, list[int]] = defaultdict(list)
    for name, layer in _layers(model.named_modules()):
        stacks[name].append(layer)
    return dict(stacks)


def _layers(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterable[tuple[str, int]]:
    for name, module in modules:
        found, number = _LAYER.fullmatch(name), getattr(module, 'layer_number', None)
        if found and isinstance(number, int) and not _MTP.search(name):
            yield found['stack'], number
