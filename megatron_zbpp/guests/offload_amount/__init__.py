"""`offload auto`: keeps on the device what copies would cost time for."""
