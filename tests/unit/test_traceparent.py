"""A trace context is one by W3C's rules, or it is left out; over HTTP and over gRPC alike."""

from __future__ import annotations

import json

import pytest

from trtllm_bls.http.limits import traceparent
from trtllm_bls.triton.tensors import traceparent_of
from trtllm_bls.wire.traceparent import valid_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-ff", True),
        (f"cc-{TRACE}-{PARENT}-01", True),  # a later version begins as this one does
        (f"cc-{TRACE}-{PARENT}-01-what.the.future.has", True),
        (f"cc-{TRACE}-{PARENT}-01-", True),
        (f"cc-{TRACE}-{PARENT}-01.what", False),
        (f"cc-{TRACE}-{PARENT}-01-{'x' * 300}", False),
        (f"00-{TRACE}-{PARENT}-01-what", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-1", False),
        (f"0-{TRACE}-{PARENT}-01", False),
        (f" 00-{TRACE}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-01\n", False),
        (f"00-{TRACE}{PARENT}-01", False),
        ("", False),
        ("\xff", False),
    ],
)
def test_a_trace_context_is_one_by_the_same_rule_everywhere(text: str, is_valid: bool) -> None:
    """W3C's examples of what is invalid, too: version ff, and ids of zeros alone."""
    expected = text if is_valid else None
    assert valid_traceparent(text) == expected
    assert traceparent_of(json.dumps({"traceparent": text})) == expected
    scope = {"headers": [(b"traceparent", text.encode("latin-1"))]}
    assert traceparent(scope) == (text.encode() if is_valid else b"")
