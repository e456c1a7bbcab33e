"""Calls in Python: ``name(key=value, …)`` with literals."""

from __future__ import annotations

import ast
import re

from trtllm_bls.text.call_reader import CallReader, Reading, ReadingText
from trtllm_bls.text.json_values import dumped
from trtllm_bls.text.notation_calls import STRING_BODIES
from trtllm_bls.text.tool_schemas import literal_value, parsed_python


def _line_end(complete: bool) -> str:
    answer_end = r"|\Z" if complete else ""
    return rf"[ \t]{{0,64}}+(?:[\n;,]{answer_end})"


def read_python(call: CallReader) -> Reading:
    """Read ``key=value, …)`` with Python's literals; they are put out once they are complete."""
    if call.offered.are_known and not call.offered.has(str(call.name)):
        raise ValueError("no tool")
    node = parsed_python("f(" + (yield from _read_parentheses(call)))
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("arguments without names")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = literal_value(keyword.value)
    if call.is_alone:
        # A name and parentheses are also prose. Only a line of nothing else is a call.
        while True:
            end = call.unread.match(_line_end(call.unread.complete))
            if end is None:
                raise ValueError("prose")
            if not end.partial:
                break
            yield from call.more()
    call.output.append(dumped(arguments))
    call.has_begun = True


_PYTHON_TOKEN = re.compile(r"[^\"'()\[\]{}<]+|.", re.S)
# The texts in quotes, by the quote that begins and ends them.
_QUOTED_BODIES = {
    **STRING_BODIES,
    '"""': re.compile(r'(?:[^\\"]+|\\.|"{1,2}(?=[^"]))*', re.S),
    "'''": re.compile(r"(?:[^\\']+|\\.|'{1,2}(?=[^']))*", re.S),
}
# An expression is read at once, in a time that grows with its values.
_MAX_PYTHON_VALUES = 10_000


def _read_parentheses(call: CallReader) -> ReadingText:
    """Read an expression to the parenthesis that closes it."""
    unread = call.unread
    parts: list[str] = []
    depth = 1
    num_values = 0
    while depth:
        char = yield from call.next()
        if char in "\"'":
            while len(unread) < 3 and not unread.ended:
                yield from call.more()
            quote = char
            if unread.text.startswith(char * 3, unread.at):
                quote = char * 3
            parts.append(unread.read(unread.at + len(quote)))
            while True:
                end = _QUOTED_BODIES[quote].match(unread.text, unread.at).end()  # type: ignore[union-attr]
                parts.append(unread.read(end))
                if unread.text.startswith(quote, unread.at):
                    break
                yield from call.more()
            parts.append(unread.read(unread.at + len(quote)))
            continue
        if (yield from call.is_at_marker()):
            raise ValueError("a marker")
        token = _PYTHON_TOKEN.match(unread.text, unread.at)
        assert token is not None
        text = token[0]
        parts.append(unread.read(token.end()))
        depth += (text in "([{") - (text in ")]}")
        num_values += text.count(",") + (text in "([{")
        if num_values > _MAX_PYTHON_VALUES:
            raise ValueError("too many values")
    return "".join(parts)
