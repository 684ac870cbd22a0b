"""`auto`: plans for what was measured, and switches to it."""
