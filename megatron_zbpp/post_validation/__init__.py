"""Optimizer steps that are taken before all ranks have agreed to them (Zero Bubble, section 4)."""
