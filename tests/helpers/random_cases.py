"""Many small random cases, counted: a rule tried on one input is only an example.

``TRTLLM_BLS_CASES`` sets how many cases detokenizers and stop matcher get together.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("TRTLLM_BLS_CASES", "12000"))
_AT_ONCE = 50


def run_cases(case: Callable[[random.Random], None], wanted: int) -> int:
    """Run ``case`` at least ``wanted`` times, each with its own chance; how often it was run.

    Hypothesis chooses the seeds and, when a case fails, reports the seed of its batch.
    """
    run = 0

    @settings(max_examples=-(-wanted // _AT_ONCE), deadline=None, derandomize=True, database=None)
    @given(st.integers(min_value=0, max_value=2**64 - 1))
    def batch(seed: int) -> None:
        nonlocal run
        chance = random.Random(seed)
        for _ in range(_AT_ONCE):
            case(chance)
            run += 1

    batch()
    return run


def cut_anywhere(chance: random.Random, length: int, most: int) -> list[slice]:
    """Cut a list of ``length`` into pieces of 0 to ``most`` items."""
    pieces, begin = [], 0
    while begin < length:
        end = min(length, begin + chance.randint(0, most))
        pieces.append(slice(begin, end))
        begin = end
    return pieces
