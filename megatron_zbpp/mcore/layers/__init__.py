"""Megatron's and Transformer Engine's layers: what computes in the passes of a schedule."""
