"""Runs programs of passes on torch. Knows no Megatron."""
