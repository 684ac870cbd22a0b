"""Facts of a schedule: proofs, programs, times, memory. Neither torch nor Megatron."""
