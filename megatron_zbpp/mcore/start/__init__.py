"""The start of a training: initial weights and random numbers that no placement changes."""
