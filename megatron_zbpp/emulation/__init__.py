"""Emulation of a GPU on a machine without one.

`cpu` for CUDA, `te` for the kernels of Transformer Engine, `apex` for the one kernel of apex that
Megatron's layers call, `nccl` for the rules of NCCL. The arithmetic is the real one, the speed is
not.
"""
