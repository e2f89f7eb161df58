"""Days of a pool's life in seconds: the real pool and planner in a simulated market, and rivals."""
