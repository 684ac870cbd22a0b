"""Tracing: pictures of an iteration as it was."""
