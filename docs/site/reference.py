"""Writes ``docs/reference.md`` from the public names' signatures and docstrings.

``make generate`` runs it. The page is to be read where it lies, so nothing is left to the site.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "reference.md"
HEAD = """# Reference of the Python names

For people whose files import from this package. These names stay
([stability](stability.md)); all others may change with any version.

## trtllm_bls.triton

`trtllm_bls.triton.tensorrt_llm_bls`, `tensorrt_llm`, `preprocessing` and `postprocessing` have one
name each, `TritonPythonModel`, which a `model.py` imports.
"""
SECTIONS = {
    "trtllm_bls.pipeline": "Your own model around a language model ([pipelines](pipelines.md)).",
    "trtllm_bls.client": "The async client ([clients](clients.md)).",
    "trtllm_bls.openai": (
        "The OpenAI API inside another server ([openai](openai.md#inside-another-server))."
    ),
    "trtllm_bls.errors": "The errors, all of which are a `TrtllmBlsError`.",
}


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(section(name, about) for name, about in SECTIONS.items())


def section(module_name: str, about: str) -> str:
    """Return the section of one module, whose public names are sorted."""
    module = importlib.import_module(module_name)
    entries = [entry(name, getattr(module, name)) for name in public_names(module)]
    return f"\n## {module_name}\n\n{about}\n" + "".join(entries)


def public_names(module: Any) -> list[str]:
    """Return what a module offers: ``__all__``, or its own classes."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]
    return sorted(own, key=str.lower)


def entry(name: str, value: Any) -> str:
    """Return what is said of one name."""
    if inspect.ismodule(value):
        value_text = f"A module: {described(value).partition(chr(10) * 2)[0]}"
        functions = [
            row(function, getattr(value, function)) for function in ("serving", "load", "Double")
        ]
        return f"\n### {name}\n\n{value_text}\n\n{table(functions)}"
    head = f"\n### {name}\n\n"
    if not callable(value):
        return f"{head}The value of a `{type(value).__name__}`.\n"
    if inspect.isfunction(value) or dataclasses.is_dataclass(value):
        head += f"```python\n{name}{signature(value)}\n```\n\n"
    text = head + (described(value) or "A value.") + "\n"
    rows = list(members(value)) if inspect.isclass(value) else []
    return text + ("\n" + table(rows) if rows else "")


def members(value: type) -> Iterator[str]:
    """Yield the rows of a class's own methods and properties, those of its bases last."""
    seen: set[str] = set()
    for base in value.__mro__:
        if not base.__module__.startswith("trtllm_bls.") or base.__module__ in _INNER:
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            is_told = isinstance(member, property) or inspect.isfunction(member)
            if is_told and inspect.getdoc(member):
                yield row(name, member)


_INNER = ("trtllm_bls.triton.served_model", "trtllm_bls.orchestrator.deployment")


def row(name: str, member: Any) -> str:
    """Return the row of one member."""
    call = "" if isinstance(member, property) else signature(member)
    first = described(member).partition("\n\n")[0]
    cells = [f"`{name}{call}`", " ".join(first.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(rows: list[str]) -> str:
    """Return a table of rows."""
    return "\n".join(["| | |", "| --- | --- |", *rows]) + "\n"


class _Annotation:
    """An annotation that is shown as it was written."""

    def __init__(self, text: Any) -> None:
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


def signature(value: Any) -> str:
    """Return the arguments of a function or class, and what it returns."""
    found = inspect.signature(value)
    parameters = []
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=_Annotation(parameter.annotation))
        if parameter.default is not parameter.empty and "<" in repr(parameter.default):
            parameter = parameter.replace(default=...)  # a value whose text has an address
        parameters.append(parameter)
    returned: Any = found.empty
    if not inspect.isclass(value) and found.return_annotation is not found.empty:
        returned = _Annotation(found.return_annotation)
    return str(found.replace(parameters=parameters, return_annotation=returned))


def described(value: Any) -> str:
    """Return a docstring as Markdown."""
    text = inspect.getdoc(value) or ""
    text = re.sub(r"::\n\n((?:    .*\n?|\n)+)", lambda code: f":\n\n{code[1]}", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
