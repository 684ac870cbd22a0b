"""The output layer on all ranks (Vocabulary Parallelism, arXiv 2411.05288)."""
