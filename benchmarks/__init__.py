"""Benchmarks: emulated pipelines side by side with peers, and the runtime's own cost per pass."""
