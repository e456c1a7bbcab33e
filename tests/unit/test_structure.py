"""The package's shape, which a reader has to hold in the head."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trtllm_bls

PACKAGE = Path(trtllm_bls.__file__).parent
MOST_MODULES, MOST_EDGES = 33, 114


def imports(file: Path) -> Iterator[str]:
    """The top-level modules and packages of ours that a file imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "trtllm_bls":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trtllm_bls."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (name[1] for name in names if name[0] == "trtllm_bls" and name[1:])


def test_modules_and_the_imports_between_them_stay_few() -> None:
    """A new module or a new dependency replaces another, or comes with a better layout."""
    modules = {
        path.stem: [path] if path.is_file() else list(path.rglob("*.py"))
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    del modules["__init__"]
    edges = {
        (module, imported)
        for module, files in modules.items()
        for file in files
        for imported in imports(file)
        if imported in modules and imported != module
    }
    assert len(modules) <= MOST_MODULES, sorted(modules)
    assert len(edges) <= MOST_EDGES, sorted(edges)
