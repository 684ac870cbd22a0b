"""A real GPT on the CPU, trained by several schedules in turn."""
