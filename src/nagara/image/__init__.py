"""File trees: what a replica's root is made of, and how it is mounted."""
