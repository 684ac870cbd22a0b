"""Whole models that only a GPU can train: see test_te_models for those that need none."""

from __future__ import annotations

import importlib.util

import pytest
from gpu import marks, needs_te
from models import Job, check

pytestmark = marks


@pytest.mark.skipif(
    importlib.util.find_spec('grouped_gemm') is None, reason='needs grouped_gemm: pip install it'
)
def test_grouped_gemm_of_experts(ranks, data):
    check(ranks, data, 'zb-h1', Job('grouped experts', te=False, bf16=True))


def test_experts_one_by_one(ranks, data):
    check(ranks, data, 'zb-h1', Job('experts', te=False, bf16=True))


@needs_te
def test_te_context_parallelism(ranks, data):
    check(ranks, data, 'zb-h1', Job(bf16=True, cp=2))
