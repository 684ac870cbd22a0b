"""Searches orders of passes for given costs and memory. Neither torch nor Megatron."""
