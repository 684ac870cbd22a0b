"""A CUDA device without a GPU, which writes down what it is asked for on which stream."""
