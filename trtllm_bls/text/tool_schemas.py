"""Tools' JSON schemas, as far as reading a call needs them: the tools that may be called, and the
kinds of value that each argument takes.

A client wrote the schemas, so they may hold anything. Each argument is resolved once a request.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from trtllm_bls.text.json_values import dumped

# The errors that readers raise for a text that is no value, or no call.
NO_VALUE = (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError)
_MAX_STEPS = 256  # schemas that one argument's kinds may be spread over
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MAX_LITERAL = 1 << 16  # characters of a Python literal, which costs a microsecond each
_MAX_INTEGER_DIGITS = 4000  # Python and other readers of JSON refuse longer integers


class ValueKinds:
    """The JSON types that a schema allows, and its ``enum``; both are empty if it has neither."""

    def __init__(self, schema: object, root: object = None) -> None:
        self.types: set[str] = set()
        self.values: list[Any] = []
        pending = [schema]
        resolved: set[str] = set()
        for _ in range(_MAX_STEPS):
            if not pending:
                break
            branch = _mapping(pending.pop())
            reference = branch.get("$ref")
            if isinstance(reference, str) and reference not in resolved:
                resolved.add(reference)
                pending.append(_target(root, reference))
            for key in ("anyOf", "oneOf", "allOf"):
                branches = branch.get(key)
                if isinstance(branches, list):
                    pending += branches
            self._add(branch)

    @property
    def is_text(self) -> bool:
        """True where the value can be nothing but a text, which leaves while it is written."""
        return self.types == {"string"}

    def _add(self, schema: Mapping[str, Any]) -> None:
        values: list[Any] = []
        if isinstance(schema.get("enum"), list):
            values += schema["enum"]
        if "const" in schema:
            values.append(schema["const"])
        self.values += values
        kinds = schema.get("type")
        if kinds is None:
            kinds = list(map(_type_of, values))
        elif not isinstance(kinds, list):
            kinds = [kinds]
        self.types.update(kind for kind in kinds if isinstance(kind, str))
        if schema.get("nullable") is True:
            self.types.add("null")

    def json_of(self, text: str) -> str:
        """Return the JSON of a value that is written without its type.

        The kinds are tried from null to string; the first that the schema allows and the text is
        wins. A text of any other kind keeps its own value, an object or list without a schema is
        read, and everything else is a string.
        """
        word = text.strip()
        choices: list[str] = []
        for kind in _ORDER:
            if kind not in self.types:
                continue
            choice = self._read(kind, text, word)
            if choice is not None:
                choices.append(choice)
        for choice in choices:
            if not self.values or json.loads(choice) in self.values:
                return choice
        if choices:
            return choices[0]
        if self.types or word[:1] in ("{", "["):
            for read in (json.loads, python_literal):
                with suppress(*NO_VALUE):
                    return dumped(read(word))
        return dumped(text)

    def _read(self, kind: str, text: str, word: str) -> str | None:
        if kind == "string":
            return dumped(text)
        if kind in ("integer", "number"):
            is_number = _JSON_NUMBER.fullmatch(word) and len(word) <= _MAX_INTEGER_DIGITS
            if not is_number or (kind == "integer" and not word.lstrip("-").isdigit()):
                return None
            return word if math.isfinite(float(word)) else None
        if kind in _WORDS:
            # "None" is also a text, and null only where the value cannot be one.
            if "string" in self.types and not word.islower():
                return None
            return _WORDS[kind].get(word)
        if word[:1] != _BRACKETS[kind]:
            return None
        for read in (json.loads, python_literal):
            with suppress(*NO_VALUE):
                value = read(word)
                if isinstance(value, (dict, list)):
                    return dumped(value)
        return None


_ORDER = ("null", "integer", "number", "boolean", "object", "array", "string")
_BRACKETS = {"object": "{", "array": "["}
_WORDS = {
    "null": {"null": "null", "None": "null"},
    "boolean": {"true": "true", "True": "true", "false": "false", "False": "false"},
}
_PYTHON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_PYTHON_TYPES |= {dict: "object", list: "array", type(None): "null"}


class OfferedTools:
    """The tools of a request, by name; with ``None`` as schemas, the tools are not known."""

    def __init__(self, schemas: Mapping[str, Any] | None) -> None:
        self.schemas = schemas
        self._kinds: dict[tuple[str, str], ValueKinds] = {}

    @property
    def are_known(self) -> bool:
        return self.schemas is not None

    def has(self, name: str) -> bool:
        """True for a tool that may be called, and for any where they are not known."""
        return self.schemas is None or name in self.schemas

    @cached_property
    def only(self) -> str | None:
        """The name of the only tool, if there is one alone."""
        names = list(self.schemas or ())
        return names[0] if len(names) == 1 else None

    def named(self, raw_name: str) -> str | None:
        """Return the tool that a model means, or ``None`` where the request has no such tool.

        Models write the number of the call behind the name, and the namespace of functions before
        it, also where clients have put other characters for the dot and the colon.
        """
        if self.schemas is None:
            return None
        bare_name = re.sub(r"\Afunctions[.:_/]?", "", raw_name)
        for name in (raw_name, bare_name):
            for candidate in (name, re.sub(r"[.:_-]?\d{1,9}\Z", "", name)):
                if candidate in self.schemas:
                    return candidate
        return None

    def has_argument(self, tool: str, key: str) -> bool:
        """True for an argument of the tool's schema, and for any where that names none."""
        properties = self._properties(tool)
        return not properties or key in properties

    def kinds(self, tool: str, key: str) -> ValueKinds:
        """Return the kinds of value that an argument of a tool may have."""
        if (tool, key) not in self._kinds:
            root = _mapping(self.schemas).get(tool)
            self._kinds[tool, key] = ValueKinds(self._properties(tool).get(key), root)
        return self._kinds[tool, key]

    def _properties(self, tool: str) -> Mapping[str, Any]:
        root = _mapping(self.schemas).get(tool)
        schema = _mapping(root)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            schema = _mapping(_target(root, reference))
        return _mapping(schema.get("properties"))


def _target(root: object, reference: str) -> object:
    """Return the schema that a reference within ``root`` names, if it does."""
    if not reference.startswith("#"):
        return None
    schema = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            if not key.isdigit() or len(key) >= 6 or int(key) >= len(schema):
                return None
            schema = schema[int(key)]
        else:
            schema = _mapping(schema).get(key)
    return schema


def _type_of(value: object) -> str:
    return _PYTHON_TYPES.get(type(value), "")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


TEXT_KINDS = ValueKinds({"type": "string"})
WORD_KINDS = ValueKinds({"type": ["null", "number", "boolean"]})  # for a word without quotes


# --- Python's literals ---------------------------------------------------------------------------

_JSON_LITERALS = {"true": True, "false": False, "null": None}


def parsed_python(text: str) -> ast.expr:
    """Parse an expression. Raises one of ``NO_VALUE``."""
    with warnings.catch_warnings():  # about escapes that Python does not know
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def python_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises one of ``NO_VALUE``."""
    if len(text) > _MAX_LITERAL:
        raise ValueError("too long to be read at once")
    return literal_value(parsed_python(text))


def literal_value(node: ast.AST | None) -> Any:
    """Return the value of Python's literals, also by the names of JSON.

    Keys are text at once, as in JSON: a model can choose numbers whose hashes are equal.
    """
    if isinstance(node, (ast.List, ast.Tuple)):
        return [literal_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        literal = {}
        for key, value in zip(node.keys, node.values, strict=True):
            literal[_key(literal_value(key))] = literal_value(value)
        return literal
    if isinstance(node, ast.Name):
        return _JSON_LITERALS[node.id]
    if isinstance(node, (ast.Constant, ast.UnaryOp)):
        return ast.literal_eval(node)
    raise ValueError("no literal")


def _key(value: object) -> str:
    if isinstance(value, (list, dict)):
        raise TypeError("no key")
    return value if isinstance(value, str) else dumped(value)


def any_of(markers: Collection[str]) -> str:
    """Return a pattern of these texts."""
    return "|".join(map(re.escape, markers)) or "(?!)"
