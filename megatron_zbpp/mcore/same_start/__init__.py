"""The same start: initial weights that stock Megatron draws, whatever the placement."""
