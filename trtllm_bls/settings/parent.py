"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Send this process SIGTERM, by which it drains, when its ``parent`` has ended.

    The kernel does so whatever ended the parent. It also does so when just the *thread* has ended
    that started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # It ended before this process could ask for the signal.
        os._exit(0)
