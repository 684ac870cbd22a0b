"""Development tools: what stands in for a GPU's libraries. In a checkout only, in no wheel.

`te` for the kernels of Transformer Engine, `nccl` for the rules of NCCL. The arithmetic is the real
one, the speed is not.
"""
