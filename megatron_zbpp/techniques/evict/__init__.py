"""Activations on a partner between F and B (BPipe, ICML 2023)."""
