"""Traces of requests replayed in simulated time, to compare ways to scale. No I/O, no clock."""
