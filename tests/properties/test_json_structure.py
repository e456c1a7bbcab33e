"""The bound on nested JSON, against a reader that goes through the text byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trtllm_bls.text import json_values

DEEP, MANY = "within each other", "more than 9 lists and objects"


def expected(text: bytes) -> str | None:
    depth = deepest = opened = place = 0
    in_string = False
    while place < len(text):
        byte = text[place : place + 1]
        if byte == b'"':
            in_string = not in_string
        elif byte in (b"[", b"{") and not in_string:
            depth, opened = depth + 1, opened + 1
            deepest = max(deepest, depth)
        elif byte in (b"]", b"}") and not in_string:
            depth -= 1
        place += 2 if byte == b"\\" else 1
    if deepest > 3:
        return DEEP
    return MANY if opened > 9 else None


@given(st.lists(st.sampled_from([b"[", b"{", b"]", b"}", b'"', b"\\", b"a"])).map(b"".join))
@example(b'["' + b"\\" * 5 + b'"[[[[')
@example(b'["' + b"\\" * 4 + b'"[[[[')
@example(b"[]" * 10)
@example(b"[[[[\\")
def test_lists_and_objects_are_counted_as_a_parser_reads_them(text: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "MAX_DEPTH", 3)
        patch.setattr(json_values, "MAX_CONTAINERS", 9)
        problem = json_values.structure_problem(text)
    kind = expected(text)
    assert problem is None if kind is None else kind in str(problem)
