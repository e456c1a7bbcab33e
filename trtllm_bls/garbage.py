"""The garbage collector's settings in processes that import much and stream for long.

A collection looks at every object. A process with ``transformers`` has half a million of them, one
with torch twice as many.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects of the youngest generation, and collections of the younger one, that start a collection.
_THRESHOLDS = (20_000, 50, 50)


@contextmanager
def no_collections(*, freezes: bool = False) -> Iterator[None]:
    """Collect no garbage meanwhile: what an import makes stays, and collections look for garbage
    in it again and again, for a tenth to a third of the import's time.

    ``freezes``: at the end, leave all objects out of later collections, too. That is for a process
    that runs no user's code.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()


def freeze_loaded() -> None:
    """Collect garbage once, and leave all objects that exist now out of later collections.

    A collection would pause the process, and in a fork it would write to the memory that the fork
    shares with its parent, and so copy it.
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
    end_without_collections()


def end_without_collections() -> None:
    """Have Python leave all objects out of the full collections that it makes at its end.

    They take up to a second of CPU with torch, and the process's memory is freed in any case.
    """
    atexit.unregister(gc.freeze)  # once is enough
    atexit.register(gc.freeze)
