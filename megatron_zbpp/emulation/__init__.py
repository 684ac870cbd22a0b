"""Emulation of a GPU on a machine without one.

`cpu` for CUDA, `gloo` for NCCL, `apex` for the one kernel of apex that Megatron's layers call; `te`
loads the kernels of Transformer Engine, which are in a checkout only. The arithmetic is the real
one, the speed is not.
"""
