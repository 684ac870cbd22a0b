"""Throughput of GPT training by pipeline schedule."""
