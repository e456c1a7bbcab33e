"""The text of an error is for people: programs read attributes and codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trtllm_bls
from tests.helpers.syntax_trees import tree

PACKAGE = Path(trtllm_bls.__file__).parent
# Where a program reads the text of an error, and why nothing else tells it.
READERS = {
    "errors.py": "gRPC brings an error as a text; one function reads it, and is fed every error",
    "configure/configure_command.py": "the option that a setting came from begins the sentence",
    "engines/replicas.py": "a reason that has been logged is not logged again",
    "http/generate.py": "tritonserver tells in words alone that it did not run a request",
}
READING = {"partition", "rpartition", "startswith", "endswith", "removeprefix", "removesuffix"}
READING |= {"find", "index", "count", "replace"}


def is_error_text(node: ast.AST) -> bool:
    """``str(error)`` or ``error.message``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        node = node.args[0] if node.args else node
    elif isinstance(node, ast.Attribute) and node.attr == "message":
        node = node.value
    else:
        return False
    return isinstance(node, ast.Name) and node.id in ("error", "wire", "failure", "problem")


def readings(module: Path) -> Iterator[int]:
    """The lines that take an error's text apart, search it or compare it."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Compare) and any(
            map(is_error_text, [node.left, *node.comparators])
        ):
            yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            takes_apart = node.func.attr in READING and is_error_text(node.func.value)
            if takes_apart:
                yield node.lineno
        elif isinstance(node, ast.Subscript):
            value = node.value
            is_split = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
            if is_split and is_error_text(value.func.value):
                yield node.lineno


def test_the_text_of_an_error_is_read_nowhere_else() -> None:
    """Words change with a better sentence; what depends on them would break in silence."""
    places: dict[str, list[int]] = {}
    for module in PACKAGE.rglob("*.py"):
        if lines := list(readings(module)):
            places[str(module.relative_to(PACKAGE))] = lines
    assert {file: lines for file, lines in places.items() if file not in READERS} == {}
    assert places.keys() == READERS.keys(), "no longer read: take it out of the list"
