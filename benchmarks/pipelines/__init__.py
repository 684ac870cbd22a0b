"""Emulated pipelines side by side with peers."""
