"""An examination of models' programs by the interpreter that would run them. Run as a script.

    python -I model_code.py < '[["…/model/1/model.py", ["…/model/1", "…/model"]], …]'

Standard input has each program with the directories that Triton puts on its path. Standard output
gets the faults of each as JSON: ``[kind, detail]``. No program is run. So only a program that
cannot be compiled is certain to fail: a program may find modules on a path that it adds.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator

NO_PYTHON = "no Python"
NO_CLASS = "no class"
NO_MODULE = "no module"

_CLASS = "TritonPythonModel"
# Modules that only the Python backend's stub has.
_BACKEND_MODULES = {"triton_python_backend_utils", "c_python_backend_utils"}
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def problems(file: str, directories: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of one program; ``directories`` lead its path."""
    try:
        with open(file, "rb") as stream:
            source = stream.read()
        code = ast.parse(source, file)
        compile(source, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        yield NO_PYTHON, str(error)
        return
    names = set(_names(code))
    if not names & {_CLASS, "*"}:
        yield NO_CLASS, _CLASS
    path = sys.path
    sys.path = [*directories, *path]
    try:
        for module in _imports(code):
            if module not in _BACKEND_MODULES and not _is_found(module):
                yield NO_MODULE, module
    finally:
        sys.path = path
        importlib.invalidate_caches()


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _imports(code: ast.Module) -> Iterator[str]:
    """Yield the packages that the program always imports: outside functions, conditions and try."""
    for statement in code.body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name.partition(".")[0]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            yield statement.module.partition(".")[0]


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a program binds outside its classes and functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.alias):
            yield child.asname or child.name
        elif isinstance(child, _SCOPES):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        if not isinstance(child, _SCOPES):
            yield from _names(child)


if __name__ == "__main__":
    orders = json.load(sys.stdin)
    json.dump([list(problems(file, directories)) for file, directories in orders], sys.stdout)
