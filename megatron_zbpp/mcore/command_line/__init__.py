"""Our flags on the command line of Megatron, and what would come of it."""
