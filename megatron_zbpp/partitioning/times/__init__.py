"""Times of stages from what others measure: torch's profiler, Nsight Systems, Megatron's timers."""
