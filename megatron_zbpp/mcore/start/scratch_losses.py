"""One line about losses from scratch: those of stock Megatron, or why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_zbpp.ir import Placement
from megatron_zbpp.mcore.settings import AUTO, Settings
from megatron_zbpp.schedules import find

# settings by which a forward of Megatron's layers draws random numbers
DRAWING = (
    'hidden_dropout',
    'attention_dropout',
    'moe_input_jitter_eps',
    'moe_router_force_load_balancing',
    'moe_router_force_biased',  # from 0.17 on
    'mtp_hsm',  # from 0.20 on
)


def losses_from_scratch(settings: Settings, placement: Placement, config: Any) -> str:
    """Return one line: losses from scratch are stock Megatron's, or the reasons why they differ."""
    reasons = '; '.join(_reasons(settings, placement, config))
    if reasons:
        return f"losses from scratch differ from stock Megatron's: {reasons}"
    clipped = '' if placement.is_loop else '; steps that are clipped differ in the last bits'
    return f"losses from scratch are stock Megatron's{clipped}"


def _reasons(settings: Settings, placement: Placement, config: Any) -> Iterator[str]:
    if not settings.same_start and not placement.is_loop:
        yield 'other ranks draw the initial weights (--no-pipeline-same-start)'
    drawn = [f'{name} {value}' for name in DRAWING if (value := getattr(config, name, None))]
    if drawn and settings.dropout_seeds:
        yield (
            f'random numbers of {", ".join(drawn)} are seeded by layer and microbatch '
            '(--pipeline-dropout-seeds), as by 1f1b with that flag'
        )
    elif drawn and placement != Placement.loop(placement.num_ranks):
        yield (
            f'other ranks draw the random numbers of {", ".join(drawn)} (zb-h1 keeps them; all '
            'schedules draw the same with --pipeline-dropout-seeds)'
        )
    if getattr(config, 'fp4', None) and settings.schedule != '1f1b':
        yield 'backwards round gradients of fp4 at random, in the order of passes'
    name = settings.schedule
    if isinstance(name, str) and name != AUTO and find(name).asynchronous:
        yield f'{name} is asynchronous: gradients are of older weights'
    if settings.freeze is not None:
        yield 'freezing trains another model'
    if settings.slices is not None:
        yield 'slices round otherwise'
    if settings.vocab_parallel is not None:
        yield 'shards of the output layer round otherwise'
