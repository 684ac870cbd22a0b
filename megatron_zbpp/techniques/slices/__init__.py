"""Slices of a sequence (Seq1F1B, arXiv 2406.03488)."""
