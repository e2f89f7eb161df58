"""nagara runs AI inference servers so that an expensive device never waits.

Importing the package loads nothing else: no torch, no web server.
"""

__version__ = "0.1.0"
