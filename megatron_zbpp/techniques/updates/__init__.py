"""Updates of the weights within an iteration."""
