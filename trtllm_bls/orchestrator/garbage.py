"""The garbage collector's settings in processes that stream."""

from __future__ import annotations

import gc

# Objects of the youngest generation, and collections of the younger one, that start a collection.
_THRESHOLDS = (20_000, 50, 50)


def freeze_loaded() -> None:
    """Collect garbage once, and leave all objects that exist now out of later collections.

    A collection looks at every object: it would pause the process, and in a fork it would write to
    the memory that the fork shares with its parent, and so copy it.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Have a process that has loaded its models, and streams from now on, collect rarely.

    The objects made at load stay for good. A full collection would look through all of them and
    pause every stream for tens of milliseconds. Requests leave no reference cycles, so frequent
    collections would find nothing.
    """
    freeze_loaded()
    gc.set_threshold(*_THRESHOLDS)
