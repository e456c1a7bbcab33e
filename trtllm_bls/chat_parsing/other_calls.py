"""Tool calls that are not JSON, read as they are written: XML tags, and Python."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from trtllm_bls.chat_parsing.call import CharReader, Reader, Reading, Span, begun_at_end

_LONGEST_NAME = 256
_KEY = re.compile(r"<parameter=([^<>\n]{1,256})>\n?")
_KEY_BEGUN = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_VALUE_END = re.compile("|".join(_VALUE_ENDS))
_END = "</function>"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class XmlCall(Reader):
    """What follows ``<function=``: ``name>``, ``<parameter=key>value</parameter>`` …, and the end.

    ``schemas``: the tools' parameters by name, which tell texts from other values. A text leaves
    while it is written.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        schemas: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(begin, more)
        self._schemas = schemas or {}
        self._properties: Mapping[str, Any] = {}
        self._step: Callable[[XmlCall], bool] = XmlCall._name
        self._text = ""  # not read
        self._before = "{"  # what precedes the next key
        self._kinds: set[str] = set()  # JSON types that the value under way may have
        self._value = ""  # so far, unless it is a text

    def feed(self, text: str) -> int:
        self._text = text
        while self._text and not (self.done or self.broken) and self._step(self):
            pass
        self._pass_on()
        return len(text) - len(self._text)

    def _name(self) -> bool:
        end = re.search(r"[<>\s]", self._text)
        if end is None and len(self._text) < _LONGEST_NAME:
            return False
        name = self._text[: end.start()] if end else ""
        self._text = self._text[len(name) + 1 :]
        if end is None or end[0] != ">" or not name:
            self.broken = True
            return True
        self._step = XmlCall._parameter
        self._properties = _mapping(_mapping(self._schemas.get(name)).get("properties"))
        self._say(name)
        return True

    def _parameter(self) -> bool:
        text = self._text.lstrip()
        key = _KEY.match(text)
        if (key and key.end() == len(text)) or _is_unfinished(text):
            return False  # the key's line may go on
        if key is None:  # where the end was forgotten, too
            self._text = text.removeprefix(_END)
            self._given += "{}" if self._before == "{" else "}"
            self.done = True
            return True
        self._text = text[key.end() :]
        self._kinds = _kinds(self._properties.get(key[1]))
        self._given += f"{self._before}{_dumped(key[1])}: " + '"' * ("string" in self._kinds)
        self._before, self._value, self._step = ", ", "", XmlCall._value_of_key
        return True

    def _value_of_key(self) -> bool:
        end = _VALUE_END.search(self._text)
        sure = end.start() if end else len(self._text) - begun_at_end(self._text, _VALUE_ENDS)
        value, self._text = self._text[:sure], self._text[end.end() if end else sure :]
        if "string" in self._kinds:
            self._given += _dumped(value)[1:-1] + '"' * (end is not None)
        else:
            self._value += value
            self._given += _json_of(self._value, bool(self._kinds)) if end else ""
        if end is not None:
            self._step = XmlCall._parameter
        return end is not None


class PythonCall(CharReader):
    """``name(key=value, …)`` with Python's literals, which leaves once it is complete.

    ``known``: the only names that are called; ``None``: any.
    """

    def __init__(
        self,
        begin: Callable[[str], None],
        more: Callable[[str], None],
        known: Mapping[str, Any] | None = None,
    ) -> None:
        self._known = known
        super().__init__(begin, more)

    def _read(self) -> Reading:
        name = text = ""
        while (char := (yield)) != "(":
            name += char
            if len(name) > _LONGEST_NAME or not re.fullmatch(r"[^\W\d][\w.-]*", name):
                raise ValueError("no name")
        if self._known is not None and name not in self._known:
            raise ValueError("no tool")
        span = Span("\"'", depth=1)
        while not span.take(char := (yield)):
            text += char
        self._given = _dumped(_keywords(text))
        self._say(name)


class _JsonNames(ast.NodeTransformer):
    """JSON's words for Python's; other names are no literals."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(_JSON_NAMES[node.id])


def _keywords(text: str) -> dict[str, Any]:
    """The arguments of a call by name. Raises what ``ast`` does, and for other arguments."""
    with warnings.catch_warnings():  # of escapes that Python does not know
        warnings.simplefilter("ignore")
        call = ast.parse(f"f({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("arguments without names")
    return {str(k.arg): ast.literal_eval(_JsonNames().visit(k.value)) for k in call.keywords}


def _json_of(text: str, typed: bool) -> str:
    """The value as JSON; without a type known, only what looks like an object or a list."""
    if typed or text.lstrip()[:1] in ("{", "["):
        for read in (json.loads, ast.literal_eval):
            try:
                return _dumped(read(text.strip()))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    return _dumped(text)


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema names for a value; it is the caller's, so anything may be."""
    branches = [schema]
    for key in ("anyOf", "oneOf"):
        further = _mapping(schema).get(key)
        branches += further if isinstance(further, list) else []
    named = [_mapping(branch).get("type") for branch in branches]
    types = [kind for kinds in named for kind in (kinds if isinstance(kinds, list) else [kinds])]
    return {kind for kind in types if isinstance(kind, str)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_unfinished(text: str) -> bool:
    """Whether this may be the beginning of a key or of the end."""
    begins = any(whole.startswith(text) for whole in ("<parameter=", _END))
    return (begins and text != _END) or _KEY_BEGUN.fullmatch(text) is not None
