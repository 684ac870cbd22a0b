"""Optimizer steps: validated behind the next forwards."""
