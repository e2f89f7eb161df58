"""Objects named by their hash: tiers, fetching each byte once, verifying, evicting, serving."""
