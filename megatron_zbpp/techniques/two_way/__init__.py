"""Two-way pipelines: microbatches against each other, each way on a copy of the model."""
