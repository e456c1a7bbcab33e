"""The ``model.py`` files that versions of this package wrote, and the users' changes to them.

A file is known by its text. Byte order mark, line ends and blanks at the ends of lines do not
count: editors and Git change them, and Python reads the same program.
"""

from __future__ import annotations

import ast
import difflib
import pkgutil
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import trtllm_bls
from trtllm_bls.bundled import REPOSITORY

_TODAYS = re.compile(
    r'\s*(?:""".*?"""\s*)?from trtllm_bls\.triton\.(\w+) import TritonPythonModel\s*', re.S
)
_PACKAGE_DIR = Path(trtllm_bls.__file__).parent


@cache
def _earlier_programs() -> Mapping[str, str]:
    """Return the model of every program that versions before 0.3.0 wrote, by its text."""
    programs = {}
    with tarfile.open(Path(__file__).with_name("model_files.tar.xz")) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            programs[content.read().decode()] = member.name.partition("/")[0]
    return programs


def todays_program(model: str) -> str:
    """Return the ``model.py`` that this version writes for one of its models."""
    return (REPOSITORY / model / "1" / "model.py").read_text(encoding="utf-8")


def program_of(code: Path) -> str | None:
    """Return the text of a ``model.py`` in one form; ``None`` where it is no UTF-8."""
    try:
        text = code.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines).rstrip() + "\n"


def model_of(code: Path) -> str | None:
    """Return the model that a ``model.py`` is; ``None`` where no version wrote it so."""
    program = program_of(code)
    if program is None:
        return None
    if match := _TODAYS.fullmatch(program):
        return match[1]
    return _earlier_programs().get(program)


def is_ours(repository: Path) -> bool:
    """Return True if a version of this package wrote any model of a repository."""
    return any(model_of(code) for code in repository.glob("*/[0-9]*/model.py"))


def names_gone(code: Path) -> Iterator[str]:
    """Yield the names that a ``model.py`` imports from this package and that are gone from it."""
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.walk(ast.parse(code.read_bytes())):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            module = getattr(node, "module", None)
            for alias in node.names:
                name = alias.name
                if module:
                    name = f"{module}.{name}"
                if name.partition(".")[0] != "trtllm_bls":
                    continue
                try:
                    pkgutil.resolve_name(name)
                except (ImportError, AttributeError):
                    yield name


def new_place(name: str) -> str | None:
    """Return today's dotted name of an object that was called ``name``; ``None`` if it is gone."""
    old_module, _, attribute = name.rpartition(".")
    stem = old_module.rpartition(".")[2]
    # A module often keeps its own name where its folder gets another one.
    files = sorted(_PACKAGE_DIR.rglob("*.py"), key=lambda file: (file.stem != stem, file))
    for file in files:
        if attribute not in file.read_text(encoding="utf-8"):
            continue
        module = ".".join(file.relative_to(_PACKAGE_DIR.parent).with_suffix("").parts)
        for statement in ast.parse(file.read_bytes()).body:
            if attribute in _names_defined(statement):
                return f"{module.removesuffix('.__init__')}.{attribute}"
    return None


def _names_defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return set()


def changes_of(code: Path, model: str) -> Iterator[str]:
    """Yield the lines of a diff from a program that a version wrote to the user's ``model.py``.

    Of the programs that versions wrote as ``model``, it is the one that needs fewest changes.
    """
    program = (program_of(code) or "").splitlines()
    programs = [text for text, name in _earlier_programs().items() if name == model]
    if (REPOSITORY / model / "1" / "model.py").is_file():
        programs.append(todays_program(model))

    def likeness(text: str) -> float:
        return difflib.SequenceMatcher(None, text.splitlines(), program).ratio()

    original = max(programs, key=likeness)
    name = "/".join(code.parts[-3:])
    yield from difflib.unified_diff(
        original.splitlines(), program, f"{name} as it was written", name, lineterm=""
    )
