"""Megatron's settings for what a schedule does by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_zbpp.mcore import superseded


def test_what_is_set_is_taken_back_and_said():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True)
    (said,) = superseded.drop(config)
    assert said == '--defer-embedding-wgrad-compute has no effect: the schedule places all W passes'
    assert not config.defer_embedding_wgrad_compute
    assert not list(superseded.drop(config)) and not list(superseded.drop(SimpleNamespace()))


def test_a_model_that_was_built_with_it_is_refused():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True)
    with pytest.raises(NotImplementedError, match=r'enable\(\) before the model is built'):
        superseded.require_none(config)
    superseded.require_none(SimpleNamespace(defer_embedding_wgrad_compute=False))
