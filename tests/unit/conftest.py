"""Fixtures of the pure tier."""

from __future__ import annotations

import pytest

from megatron_zbpp.planner.budget import Budget


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps end every search, never the clock: a busy machine plans as an idle one does."""
    made = Budget.__init__

    def patient(self: Budget, *args, **named) -> None:
        made(self, *args, **named)
        self._deadline += 600.0

    monkeypatch.setattr(Budget, '__init__', patient)
