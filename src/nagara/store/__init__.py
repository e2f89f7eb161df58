"""Objects by hash, tiers, fetching once, verifying, evicting."""
