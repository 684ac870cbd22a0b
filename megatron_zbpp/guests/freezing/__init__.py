"""Freezing: leaves out the weight gradients that a plan names."""
