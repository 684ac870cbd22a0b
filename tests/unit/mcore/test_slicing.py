"""Keys and values that slices keep for each other."""

from __future__ import annotations

import torch

from megatron_zbpp.mcore.techniques.sliced_layers import Kept, Slice


def test_memory_is_known_while_it_is_kept():
    kept, layers = Kept(), [torch.nn.Linear(1, 1) for _ in range(2)]
    for microbatch in (0, 1):
        for start in (0, 2):
            part = Slice(microbatch, start, start + 2, 4)
            kept.visited.clear()
            for layer in layers:
                found = kept.extended(layer, part, *torch.zeros(2, 2, 1, 1, 8))
                own = {each.untyped_storage()._cdata for each in found}
                assert len(own) == 2 and own <= kept.storages
    assert len(kept.storages) == 8  # of two microbatches and layers, keys and values
    kept.drop(0)
    assert len(kept.storages) == 4
    kept.drop(1)
    assert not kept.storages
