"""Files of Python as syntax trees. Many rules read the whole package, in one process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree(file: Path) -> ast.Module:
    """Return the tree of a file, which no test may change."""
    return ast.parse(file.read_text(encoding="utf-8"))
