"""Directories that the tests of one process share. They are removed after its last test."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

_made: list[Path] = []


def shared_directory(name: str) -> Path:
    """Make a directory whose name begins with ``name``."""
    path = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    _made.append(path)
    return path


def remove_shared_directories() -> None:
    """Remove all that this process has made."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)
