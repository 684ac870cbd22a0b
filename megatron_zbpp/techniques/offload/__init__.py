"""Activations on the host between F and B (PipeOffload, arXiv 2503.01328)."""
