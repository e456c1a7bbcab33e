"""How the cost of a piece of work grows with its size, by the CPU time of this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

FACTOR = 16  # between the two sizes
# Linear work costs 16 times as much, with a logarithm 21 times, quadratic work 256 times.
MOST = 60.0
_NOISE_S = 0.0006  # what a small size costs at least; work that is cheap at the large size passes
_TRIES = 4

# Makes the work of a size; making it is not measured.
Maker = Callable[[int], Callable[[], object]]


def _cost(make: Maker, size: int) -> float:
    work = make(size)
    gc.collect(0)
    gc.disable()
    try:
        began = time.process_time()
        work()
        return time.process_time() - began
    finally:
        gc.enable()


def growth(make: Maker, size: int) -> float:
    """How many times as much ``FACTOR`` times the size costs; the least of several tries, since
    a busy machine can only make work dearer."""
    small, large = float("inf"), float("inf")
    for _ in range(_TRIES):
        large = min(large, _cost(make, FACTOR * size))
        if large < MOST * _NOISE_S:
            return 0.0
        small = min(small, _cost(make, size))
        if large / max(small, _NOISE_S) <= MOST:
            break
    return large / max(small, _NOISE_S)
