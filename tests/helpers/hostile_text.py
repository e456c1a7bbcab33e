"""The package's modules as they are read for what they feed, and what hostile text is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trtllm_bls
from tests.helpers.syntax_trees import tree

PACKAGE = Path(trtllm_bls.__file__).parent
SIZE = 1024
# What material is made of, beside what a pattern or a format itself is made of.
MARKS = (" ", "a", "[", '"', "\n", "1", "{", "(", "\\", "<", ",", "'", "{a:", "a<tool_call>b", "-")


def module_names() -> dict[str, Path]:
    """Return the package's modules and their files."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module's name and its tree."""
    for name, path in module_names().items():
        yield name, tree(path)
