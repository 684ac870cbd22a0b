"""What follows from a schedule: proofs, programs, times, memory. Neither torch nor Megatron."""
