"""Ground floor: clock, spans, error root, units, durable files. Standard library only."""
