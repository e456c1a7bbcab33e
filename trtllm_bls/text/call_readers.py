"""The reader of a call, by the language of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable

from trtllm_bls.text.call_reader import GAP, CallReader, Reading
from trtllm_bls.text.notation_calls import read_json, read_notation
from trtllm_bls.text.python_calls import read_python
from trtllm_bls.text.xml_calls import read_xml

_READERS: dict[str, Callable[[CallReader], Reading]] = {
    "json": read_json,
    "xml": read_xml,
    "python": read_python,
    "gemma": read_notation,
}


def reading_of(call: CallReader) -> Reading:
    """Return the reading of a call."""
    reading = _READERS[call.tools.language](call)
    if call.is_marked or not call.tools.loose_end:
        return reading
    return _followed(call, reading)


def _followed(call: CallReader, reading: Reading) -> Reading:
    """Read a call that is one only if the format's marker follows it."""
    call.is_held = True
    yield from reading
    if (yield from call.match(rf"{GAP}{re.escape(call.tools.loose_end)}")) is None:
        raise ValueError("no marker")
    call.is_held = False
