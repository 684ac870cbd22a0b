"""What a schedule costs and whether it may run: costs, memory, simulation, proof. No torch."""
