"""What tests on a GPU need."""

import importlib.util

import pytest
import torch

CUDA = torch.cuda.is_available()
marks = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason='needs an NVIDIA GPU')]
needs_te = pytest.mark.skipif(
    importlib.util.find_spec('transformer_engine') is None,
    reason='needs transformer_engine: pip install megatron_zbpp[te]',
)
