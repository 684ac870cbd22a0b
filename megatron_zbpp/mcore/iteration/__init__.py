"""One iteration of training or evaluation."""
