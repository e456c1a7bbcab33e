"""How much of a claim a run proves where more cases cost more: `make test` or `make test-all`.

This is the only place that tells the tiers apart, beside the marker ``slow``. A bare ``pytest``
runs as `make test` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

FULL = bool(os.environ.get("TRTLLM_BLS_FULL"))  # set by `make test-all`
_STRIDE = 5


def budget(quick: int, full: int) -> int:
    """Return how many cases, or of which size, a test takes in this run."""
    return full if FULL else quick


def pairs(first: Sequence[A], second: Sequence[B]) -> list[tuple[A, B]]:
    """Return all pairs, or a fifth of them in which each of ``first`` and of ``second`` is."""
    stride = 1 if FULL else min(_STRIDE, len(first), len(second))
    chosen = []
    for (row, one), (column, other) in product(enumerate(first), enumerate(second)):
        if (row + column) % stride == 0:
            chosen.append((one, other))
    return chosen


def sample(cases: Iterable[A]) -> list[A]:
    """Return all cases, or the first, each fifth after it, and the last."""
    every = list(cases)
    if FULL:
        return every
    chosen = every[::_STRIDE]
    if (len(every) - 1) % _STRIDE:
        chosen.append(every[-1])
    return chosen
