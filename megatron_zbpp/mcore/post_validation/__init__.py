"""Post-validation of the optimizers of Megatron."""
