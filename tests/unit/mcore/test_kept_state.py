"""How much old state an early step keeps, of the memory that there is."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_zbpp.mcore.optimizer import early_steps

BYTES = {
    'memory_allocated': 7,
    'memory_reserved': 60,
    'max_memory_allocated': 50,
    'mem_get_info': (10, 100),
}


@pytest.mark.parametrize(
    ('share', 'limit', 'expected'), [(1.0, None, 13), (0.5, None, 35), (0.5, 20 / 2**30, 20)]
)
def test_an_early_step_keeps_what_there_is_memory_for(share, limit, expected):
    """Of 63 bytes that are free 56 can be used, and passes have needed 43: those ahead a share."""
    answers = {name: lambda device, value=value: value for name, value in BYTES.items()}
    with mock.patch.object(early_steps, 'KEPT_BYTES', 0):
        with mock.patch.multiple(torch.cuda, **answers):
            assert early_steps.most_kept(torch.device('cuda', 1), share, limit) == expected
        assert early_steps.most_kept(torch.device('cpu'), share, limit) == 0
    assert early_steps.most_kept(torch.device('cpu'), share, None) == early_steps.KEPT_BYTES
