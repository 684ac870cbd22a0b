"""Observation of iterations: measured, put on one clock, written down."""
