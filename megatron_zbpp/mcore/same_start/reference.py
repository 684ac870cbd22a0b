"""The stages of stock Megatron whose initial weights a model gets, and those of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_zbpp.ir import Placement
from megatron_zbpp.ir.layout import layers_per_stage, layout_string
from megatron_zbpp.mcore import layout
from megatron_zbpp.mcore.same_start.order import Chains, can_be_drawn, chains
from megatron_zbpp.runtime.log import job_log


def stages_of(given: Mapping[str, Any], placement: Placement) -> list[str]:
    """Return the parts of each stage, in model order, in the language of Megatron's layout.

    Args:
        given: to the constructor of the model.
        placement: of the stages.
    """
    pattern = given.get('hybrid_layer_pattern') or given.get('hybrid_override_pattern')
    if pattern is None:
        return layout.text_by_config(given['config'], placement).split('|')
    main, _, mtp = pattern.partition('/')
    return layout_string([len(segment) for segment in main.split('|')], bool(mtp)).split('|')


def chains_of(asked: bool | str, stages: Sequence[str], placement: Placement) -> Chains | None:
    """Return in which order stock Megatron draws the parts of the stages.

    None where ranks would wait for each other forever.

    Args:
        asked: the stages of stock Megatron; True: one a rank, as even as can be.
        stages: of the schedule, as `stages_of`.
        placement: of the stages.

    Raises:
        ValueError: the stages of stock Megatron have other layers.
    """
    stock = asked.split('|') if isinstance(asked, str) else _one_a_rank(stages, placement)
    layers = [''.join(each).strip('EL') for each in (stock, stages)]
    if layers[0] != layers[1] or len(stock) % placement.num_ranks:
        raise ValueError(
            f'same_start {"|".join(stock)} is not of this model, which has {"|".join(stages)} on '
            f'{placement.num_ranks} ranks: give the stages of stock Megatron with as many layers, '
            'or leave it True'
        )
    drawn = chains(stock, stages, placement.num_ranks)
    if can_be_drawn(drawn, placement):
        return drawn
    job_log.warning(
        'initial weights are not those of stock Megatron: its order of drawing them would keep '
        'ranks waiting for each other'
    )
    return None


def _one_a_rank(stages: Sequence[str], placement: Placement) -> list[str]:
    """Return the stages of 1F1B with the same layers, as even as can be."""
    text, ranks = ''.join(stages), placement.num_ranks
    layers = text.count('t')
    if layers < ranks:  # Megatron has no such stages
        return layout_string([layers] + [0] * (ranks - 1), text.count('m')).split('|')
    counts = layers_per_stage(layers, Placement.loop(ranks))
    return layout_string(counts, text.count('m')).split('|')
