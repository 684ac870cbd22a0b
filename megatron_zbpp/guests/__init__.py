"""Guests watch a training; they may change its schedule, or fill the time in which it waits."""
