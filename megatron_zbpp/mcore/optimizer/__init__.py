"""Optimizer steps: validated behind the next forwards, or of an asynchronous schedule."""
