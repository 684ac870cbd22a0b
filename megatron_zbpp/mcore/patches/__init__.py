"""Patches of Megatron and Transformer Engine, a file for each thing that is replaced."""
