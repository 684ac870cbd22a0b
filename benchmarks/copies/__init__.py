"""What it costs to move activations, beside what the simulator says; and what it frees."""
