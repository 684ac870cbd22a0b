"""Checkpoints whose content is kept by rank and chunk."""
