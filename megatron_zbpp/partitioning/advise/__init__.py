"""Advice: sizes of parallelism, micro batch, schedule and recomputation for given GPUs."""
