"""How long OpenMP's threads, with which torch computes, wait for work in a loop before they sleep."""

import os

# Tens of microseconds, about as long as sleeping and waking take by themselves.
_TURNS = "10000"


def wait_briefly() -> None:
    """Have the threads of this process, and of those it starts, sleep soon after a product.

    GNU's OpenMP otherwise has them go round in a loop for milliseconds. Where other programs want the cores, each
    thread then waits so for one that does not run, and what is computed takes longer. What the
    environment says already stands, and a process that has torch loaded goes on as it is.
    """
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = _TURNS
