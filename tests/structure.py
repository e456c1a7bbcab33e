"""A report of the package's shape: its modules, their lines, and the imports between them.

    python -m tests.structure

What a module may import is checked (`setup.cfg`); how many there are is for a reader to judge.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import trtllm_bls

PACKAGE = Path(trtllm_bls.__file__).parent


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


def main() -> int:
    modules = {
        path.stem: [path] if path.is_file() else list(path.rglob("*.py"))
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    del modules["__init__"]
    edges = 0
    for module, files in sorted(modules.items()):
        found = {imported for file in files for imported in imports(file)}
        used = sorted(found & modules.keys() - {module})
        edges += len(used)
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        print(f"{module:14} {lines:6} lines in {len(files):2} files, imports {', '.join(used)}")
    print(f"{len(modules)} modules, {edges} imports between them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
