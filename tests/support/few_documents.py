"""Megatron's mock data, of fewer documents; importing this makes it so.

With the 100,000 that it has, each rank shuffles an index of 13 million samples of 16 tokens: a
third of what a training here would take. No test reads more than a document or two.
"""

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

MockGPTLowLevelDataset.size = 1000
