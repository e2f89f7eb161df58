"""The `nagara` command, one file per noun."""
