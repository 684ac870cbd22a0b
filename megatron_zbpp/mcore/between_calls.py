"""Refuses what a program changes of models between the calls of an asynchronous schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_zbpp.mcore.side_effects import FIRST, watched_of
from megatron_zbpp.post_validation.watch import MODES, Watch, Watched, summary
from megatron_zbpp.runtime.compat import unseen_by_autograd


class BetweenCalls:
    """Compares models before and behind the time in which the program has them."""

    def __init__(self, every: int) -> None:  # calls between two comparisons of values
        self._every, self._calls, self._hashed = every, 0, False
        self._watched: tuple[Sequence[torch.nn.Module], Watched] | None = None
        self._watch: Watch | None = None
        self._training: list[bool] = []

    def begin(self, models: Sequence[torch.nn.Module]) -> None:
        """Take note of `models`: a call has ended."""
        new = self._watched is None or self._watched[0] != models
        self._calls = 1 if new else self._calls + 1
        self._hashed = self._calls <= FIRST or bool(self._every and self._calls % self._every == 0)
        if self._hashed or new:
            self._watched = models, watched_of(models, with_main=True)
        self._training = _training(models)
        self._note()

    def end(self, models: Sequence[torch.nn.Module]) -> None:
        """Compare, where these are the same models: the next call begins.

        Raises:
            NotImplementedError: names what the program has changed.
        """
        if self._watched is None or self._watched[0] != models:
            self._watch = None
        else:
            modes = _training(models) != self._training
            self._compare(['train() or eval()'] if modes else [])

    def _compare(self, found: list[str]) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        # evaluations change modes and set them back, and end with other hooks of ours
        found += (name for name in watch.changes() if name != MODES)
        if (differ := watch.differ()) is not None and differ:
            found = [*dict.fromkeys([*found, *watch.different()])]
        if found:
            raise NotImplementedError(
                f'a change of {summary(found)} between two calls, outside of optimizer.step(), is '
                'unsupported, because an asynchronous schedule has older weights beside the newest '
                'and has run forwards of the next batch: leave weights to the optimizer, change '
                'what else there is before the first call, or take a synchronous schedule, such '
                'as zb-v'
            )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let a step write, between two calls or within one."""
        noted = self._watch is not None
        self._compare([])
        yield
        if noted:
            self._note()

    def _note(self) -> None:
        assert self._watched is not None, 'of a call that has ended'
        self._watch = Watch(self._watched[1], self._hashed, unseen_by_autograd)


def _training(models: Sequence[torch.nn.Module]) -> list[bool]:
    return [module.training for model in models for module in model.modules()]
