"""What is replaced in Megatron and Transformer Engine, a file for each thing."""
