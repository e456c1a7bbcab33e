"""The garbage collector in a process that serves many streams."""

from __future__ import annotations

import gc

# Requests are freed by their reference counts; what a pass would look at are those still running.
_THRESHOLDS = 20_000, 50, 50


def collect_seldom() -> None:
    """Have the collector look at what requests make, and seldom; call it once all is loaded.

    What loading made stays for good: a full collection would look through all of it and hold every
    stream for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
