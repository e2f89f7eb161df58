"""How the threads of one step wait for each other.

A step of the CPU kernel has some hundred barriers. By default a thread spins at each for
milliseconds before it sleeps; on a machine with other work that keeps the very thread from running
that it waits for. Imports no torch: OpenMP reads its settings once, when torch loads it.
"""

import os

# Turns of the waiting loop, a few microseconds. Measured on 2 cores with two busy processes beside
# a step of 35 ms: 62 ms with 0 to 1000 turns, 220 with 10,000, 620 with 100,000. Alone on the
# machine, 0 turns cost 2 ms of the 35 and 100 turns none.
SPIN_COUNT = "100"


def be_patient() -> None:
    """Let waiting threads sleep soon. To be called before torch is imported; what is set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
