"""A refusal of one of Megatron's settings, and readings of settings that several tables share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RECIPES = ('tensorwise', 'delayed', 'custom')  # of FP8, whose kernels are emulated
# of a HybridModel or MambaModel, whose layers are laid out by the order of the ranks
HYBRID = (
    'hybrid_layer_pattern',
    'hybrid_override_pattern',
    'hybrid_attention_ratio',
    'hybrid_mlp_ratio',
)


@dataclass(frozen=True)
class Refusal:
    """A setting that is refused.

    Attributes:
        setting: its name in Megatron's arguments or config.
        value: that it has.
        reason: why it does not work.
        cure: what to do.
    """

    setting: str
    value: object
    reason: str
    cure: str

    def __str__(self) -> str:
        return f'{self.setting}={self.value}: {self.reason}; {self.cure}'


def set_in(
    table: Mapping[str, tuple[str, str]], settings: Any, instead: str = ''
) -> Iterator[Refusal]:
    """Yield those of a table that are set, with what else to do `instead` of each cure."""
    for setting, (reason, cure) in table.items():
        value = getattr(settings, setting, None)
        if value:
            yield Refusal(setting, value, reason, f'{cure}, {instead}' if instead else cure)


def captured(settings: Any) -> str | None:
    """Return what captures CUDA graphs; None: nothing does."""
    graphs = getattr(settings, 'cuda_graph_impl', None)
    return None if graphs == 'none' else graphs


def scales_late(settings: Any) -> bool:
    """Return whether FP8 takes its scales from the largest values of earlier forwards."""
    recipe = getattr(settings, 'fp8_recipe', None)
    delayed = getattr(recipe, 'value', recipe) in (None, 'delayed')
    return bool(getattr(settings, 'fp8', None)) and delayed


def hybrid(settings: Any) -> str | None:
    """Return the setting that makes it a HybridModel or MambaModel; None: there is none."""
    return next((name for name in HYBRID if getattr(settings, name, None)), None)
