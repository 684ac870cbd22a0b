"""Constructions that several families share."""
