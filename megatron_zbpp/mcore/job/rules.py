"""Rules: which of Megatron's settings do not go with which schedules, why, and what to do.

A `Rule` is a row of `rules_table`. Its texts name settings in braces, so that each reader is told
in their own names: `{moe_paged_stash}` a setting, `{cuda_graph_impl:none}` a value to give it,
`{apply_rope_fusion:off}` to switch it off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from megatron_zbpp.ir import Placement

REFUSED, IGNORED, BARRIER, WAITS = 'refused', 'ignored', 'barrier', 'waits'
"""Effects: a job does not start; the setting is taken back; ranks wait for each other in each
iteration although steps do not; optimizer steps wait for all ranks."""

WAIT = 'optimizer steps wait for all ranks: %s'


@dataclass(frozen=True)
class Context:
    """Facts that conditions ask: Megatron's settings, the schedule, the machine."""

    sources: tuple[Any, ...]  # objects with settings: arguments, configs of model and of DDP
    on_cpu: bool = False  # also what only a GPU can
    with_te: bool = False  # on a CPU: Transformer Engine is there, its kernels emulated
    placement: Placement | None = None  # None: not known yet
    splits: bool = True  # the schedule has W passes
    techniques: frozenset[str] = frozenset()  # names of those that the schedule has
    joins: bool = False  # it can run a forward and a backward as one
    in_order: bool = False  # it runs back as Megatron's own offloading takes for granted
    mirrored: bool = True  # ranks that hold the same stages run them in one order
    seeded: bool = False  # each layer has its own seeds of dropout
    by_bridge: bool = False  # Megatron-Bridge makes the model

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting of the first source that has it, or a variable of the environment."""
        if name.isupper():
            return os.environ.get(name, default)
        for source in self.sources:
            value = getattr(source, name, _ABSENT)
            if value is not _ABSENT:
                return value.name if isinstance(value, Enum) else value
        return default

    def first(self, names: Iterable[str]) -> str | None:
        """Return the first name that is set."""
        return next((name for name in names if self.get(name)), None)

    @property
    def num_stages(self) -> int:
        if self.placement is not None:
            return self.placement.num_stages
        chunks = self.get('virtual_pipeline_model_parallel_size') or 1
        return self.get('pipeline_model_parallel_size', 1) * chunks


_ABSENT = object()


class When(NamedTuple):
    """A condition on the context, with the words that the docs have for it."""

    text: str
    holds: Callable[[Context], Any]

    def __and__(self, other: When) -> When:
        words = ', '.join(filter(None, (self.text, other.text)))
        return When(words, lambda c: self.holds(c) and other.holds(c))


class Is(NamedTuple):
    """A condition on the value of the row's setting, with the words that the docs have for it."""

    text: str
    holds: Callable[[Any, Context], Any]


class Rule(NamedTuple):
    """A row: a setting that has an effect where both conditions hold."""

    settings: tuple[str, ...]  # of several the first that is set
    value: Is
    when: When
    reason: str | Callable[[Context], str]
    cure: str
    effect: str


@dataclass(frozen=True)
class Refusal:
    """A setting for which a rule holds, and what is said of it."""

    setting: str  # its name in Megatron's arguments or config
    value: object
    reason: str
    cure: str

    def __str__(self) -> str:
        return f'{self.setting}={self.value}: {self.reason}' + (self.cure and f'; {self.cure}')


class _Flag(NamedTuple):
    name: str

    def __format__(self, value: str) -> str:
        if value == 'off':
            return f'--no-{self.name}'
        return f'--{self.name} {value}'.rstrip()


class _Flags(dict):
    def __missing__(self, name: str) -> _Flag:
        return _Flag(name.replace('_', '-'))


_FLAGS = _Flags(  # whose flag is not its name
    fp8=_Flag('fp8-format'),
    fp4=_Flag('fp4-format'),
    apply_rope_fusion=_Flag('rope-fusion'),
    barrier_with_L1_time=_Flag('barrier-with-level-1-timing'),
    offload=_Flag('pipeline-offload'),
    vocab_parallel=_Flag('pipeline-vocab-parallel'),
    dropout_seeds=_Flag('pipeline-dropout-seeds'),
)


def by_flags(text: str) -> str:
    """Return a text of a rule with settings named by their flags.

    >>> by_flags('give {cuda_graph_impl:none} and {apply_rope_fusion:off}, or drop {offload}')
    'give --cuda-graph-impl none and --no-rope-fusion, or drop --pipeline-offload'
    """
    return text.format_map(_FLAGS)


def check(
    context: Context, rules: Iterable[Rule], say: Callable[[str], str] = by_flags
) -> Iterator[Refusal]:
    """Yield what is said of each rule that holds, in the order of the rules.

    Args:
        context: what is known of the job.
        rules: rows of the table.
        say: returns a text with its settings in the names of the reader.
    """
    for rule in rules:
        name = context.first(rule.settings) or rule.settings[0]
        value = context.get(name)
        if rule.value.holds(value, context) and rule.when.holds(context):
            reason = say(rule.reason) if isinstance(rule.reason, str) else rule.reason(context)
            yield Refusal(name, value, reason, say(rule.cure))
