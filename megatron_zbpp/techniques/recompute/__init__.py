"""Forwards that run again (Chen et al., arXiv 1604.06174; GPipe, arXiv 1811.06965)."""
