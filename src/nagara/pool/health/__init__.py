"""Whether a machine is fit for use: checks, when they are due, and what follows from them."""
