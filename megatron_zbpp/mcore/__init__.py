"""The only room that knows Megatron."""
