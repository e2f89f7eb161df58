"""What one machine can do: mount, start, restore, stop, report."""
