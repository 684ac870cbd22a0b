"""Activations that leave the device between F and B: what autograd saved of one pass, as one."""
