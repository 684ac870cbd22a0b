"""Side tasks: steps of something else while a rank waits."""
