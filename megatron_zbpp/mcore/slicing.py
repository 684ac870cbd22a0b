"""Slices of a sequence: which one runs, and what attention keeps of those before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Slice(NamedTuple):
    """A slice of a microbatch.

    Attributes:
        microbatch: its number.
        start: its first token, in the sequence.
        end: the token behind its last one.
        total: tokens of the sequence.
    """

    microbatch: int
    start: int
    end: int
    total: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total

    @property
    def share(self) -> float:
        """Its part of the tokens."""
        return (self.end - self.start) / self.total


@dataclass(eq=False)
class Rows:
    """Keys, or values, of one microbatch in one layer: of all tokens so far.

    Attributes:
        values: (sequence, ...); None before the first slice.
        gradients: that later slices have left, of the same shape; None before the first backward.
    """

    values: torch.Tensor | None = None
    gradients: torch.Tensor | None = None


class _Extended(torch.autograd.Function):
    """Rows of a slice and of those before it; gradients of the latter wait for their backwards.

    Each slice writes its own rows of one buffer, so what a backward has saved of it stays as it
    was, though autograd would take it for changed: hence `.data`.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, own: torch.Tensor, rows: Rows, part: Slice
    ) -> torch.Tensor:
        if rows.values is None:
            rows.values = own.new_empty(part.total, *own.shape[1:])
        rows.values.data[part.start : part.end] = own
        ctx.rows, ctx.part = rows, part
        return rows.values.data[: part.end]

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        rows, part = ctx.rows, ctx.part
        if part.is_last:
            rows.gradients = gradient.clone()
        else:
            rows.gradients[: part.end] += gradient
        return rows.gradients[part.start : part.end].clone(), None, None


class Kept:
    """Keys and values of the microbatches that are under way in a stage.

    Attributes:
        storages: addresses of their memory, which all slices of a microbatch share.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.visited: set[torch.nn.Module] = set()  # in the pass that runs
        self._rows: dict[int, dict[torch.nn.Module, tuple[Rows, Rows]]] = {}

    def extended(
        self, layer: torch.nn.Module, part: Slice, *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return keys and values of a layer up to the end of a slice: views of one buffer for all.

        `own` are those of the slice, (its tokens, micro batch, heads, width of a head).
        """
        if own[0].size(0) != part.end - part.start:
            raise NotImplementedError(
                f'slices of sequences: a {type(layer).__name__} gets {own[0].size(0)} tokens where '
                f'slices have {part.end - part.start}: a forward that replaces that of GPTModel '
                'after megatron_zbpp.enable() does not cut its inputs, nor does another kind of '
                'model: replace it before, or take a schedule of whole sequences'
            )
        self.visit(layer)
        pair = self._rows.setdefault(part.microbatch, {}).setdefault(layer, (Rows(), Rows()))
        extended = tuple(
            _Extended.apply(mine, rows, part) for mine, rows in zip(own, pair, strict=True)
        )
        self.storages.update(each.untyped_storage()._cdata for each in extended)
        return extended

    def visit(self, module: torch.nn.Module) -> None:
        """Note that a module runs in this pass; raise NotImplementedError if it has already."""
        if module in self.visited:
            raise NotImplementedError(
                f'slices of sequences: a {type(module).__name__} runs twice in a pass, where keys '
                'and values of one run would be taken for those of the other: let each module '
                'run once (no layer that is shared or looped), or take a schedule of whole '
                'sequences'
            )
        self.visited.add(module)

    def drop(self, microbatch: int) -> None:
        """Forget a microbatch, whose last pass has run."""
        for pair in self._rows.pop(microbatch, {}).values():
            for rows in pair:
                if rows.values is not None:
                    self.storages.discard(rows.values.untyped_storage()._cdata)


@dataclass(eq=False)
class Running:
    """The slice that runs in this process, for Megatron's layers to ask.

    Attributes:
        part: the slice that runs; None: whole sequences do.
        kept: of its stage.
        model: the chunk of that stage, unwrapped; other models run whole.
        additive: code of the loss functions that have been shown to be sums over tokens.
    """

    part: Slice | None = None
    kept: Kept | None = None
    model: torch.nn.Module | None = None
    additive: set[object] = field(default_factory=set)

    @contextlib.contextmanager
    def slice(
        self, part: Slice | None, kept: Kept | None, model: torch.nn.Module | None
    ) -> Iterator[None]:
        """Say within that a slice runs, or a whole sequence."""
        before = self.part, self.kept, self.model
        if kept is not None:
            kept.visited.clear()
        self.part, self.kept, self.model = part, kept, model
        try:
            yield
        finally:
            self.part, self.kept, self.model = before
