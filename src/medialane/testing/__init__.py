"""What stands in for other systems: deterministic fakes of our protocols, the simulated engine, the tiny model."""
