"""A pipeline of unequal stages from costs to a partition to measured iterations: see cli."""
