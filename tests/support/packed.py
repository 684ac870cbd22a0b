"""Sequences packed behind each other, as `--sft` has them: of random lengths in each microbatch."""

import numpy
import torch
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams

KEYS = ('cu_seqlens', 'cu_seqlens_padded', 'max_seqlen', 'local_cp_size')


class Dataset(MockGPTDataset):
    """Mock data cut at random places, in the form of Megatron's SFTDataset."""

    def __getitem__(self, idx):
        sample = super().__getitem__(idx)
        length = len(sample['tokens'])
        random = numpy.random.default_rng(idx)
        cuts = random.choice(numpy.arange(1, length), random.integers(1, 5), replace=False)
        ends = torch.tensor([0, *sorted(cuts), length], dtype=torch.int32)
        lengths = ends.diff()
        padded = torch.full((length + 1,), length, dtype=torch.int32)
        padded[: len(ends)] = ends
        positions = torch.cat([torch.arange(int(each)) for each in lengths])
        return {
            'tokens': sample['tokens'],
            'labels': sample['labels'],
            'loss_mask': (positions > 0).float(),
            'position_ids': positions,
            'cu_seqlens': padded,
            'max_seqlen': lengths.max(),
        }


def sequences(batch):
    """Where the sequences of this microbatch of one sample end."""
    ends = batch['cu_seqlens'].flatten().unique_consecutive()
    longest = int(batch['max_seqlen'].max())
    return PackedSeqParams(
        qkv_format='thd',
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
