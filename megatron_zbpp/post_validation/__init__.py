"""Optimizer steps that are taken before all ranks have agreed to them (Zero Bubble, section 4)."""

STEP = 'optimizer step'
"""Name of a step where ranks meet, for the watchdog."""
