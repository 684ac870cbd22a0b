"""Keeps ranks from waiting for each other for ever."""
