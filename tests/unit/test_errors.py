"""Errors on the wire: one line, the status first, and back to what they were."""

from __future__ import annotations

import inspect

import pytest

from trtllm_bls import errors
from trtllm_bls.errors import (
    EngineError,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    TrtllmBlsError,
    Unsupported,
    from_wire,
    printable,
    to_wire,
)
from trtllm_bls.pipeline.testing import TritonError

EVERY = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, TrtllmBlsError)
]


def test_the_drawing_of_the_tree_is_complete() -> None:
    """A reader of the module sees every error there is."""
    assert errors.__doc__ is not None
    assert all(kind.__name__ in errors.__doc__ for kind in EVERY)


@pytest.mark.parametrize("kind", EVERY)
def test_every_status_is_one_of_tritons(kind: type[TrtllmBlsError]) -> None:
    """``python_backend`` looks it up by name."""
    assert hasattr(TritonError, kind.status)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("top_p", "2 is too much: at most 1"),
        Unsupported("beam_width", "no beams"),
        EngineError("broken: really"),
        Overloaded("later"),
    ],
)
def test_an_error_comes_back_as_what_it_was(error: TrtllmBlsError) -> None:
    """Kind, message and field; so a chain of our models tells the caller the same."""
    back = from_wire(to_wire(error))
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "field", None) == getattr(error, "field", None)


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), EngineStalled("silent")])
def test_what_another_try_may_mend_stays_so(error: TrtllmBlsError) -> None:
    """Which of them it was is lost on the way, that one may try again is not."""
    back = from_wire(to_wire(error))
    assert (back.status, str(back)) == ("UNAVAILABLE", str(error))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Executor failed (/src/x.cpp:60)\n1 0x7f /opt/lib.so", "Executor failed (/src/x.cpp:60)"),
        ("\nboom\n\nAt:\n  /models/m/1/model.py(3): execute\n", "boom"),
        ("INVALID_ARG: no field here", "INVALID_ARG: no field here"),
        ("UNAVAILABLE: ", "UNAVAILABLE:"),
        ("", ""),
    ],
)
def test_text_of_other_engines_is_an_engine_error(text: str, message: str) -> None:
    """Its first line: what is below belongs to the engine's log."""
    back = from_wire(text)
    assert type(back) is EngineError and str(back) == message


@pytest.mark.parametrize(
    "text",
    [
        "UNAVAILABLE: full; try again in about ² s",
        "INVALID_ARG: input_ids: ² tokens; at most ⑤ are allowed",
    ],
)
def test_what_looks_like_a_number_and_is_none_is_text(text: str) -> None:
    """Python calls such characters digits, and reads no number from them."""
    assert str(from_wire(text)) == text.partition(": ")[2]


def test_a_message_of_many_lines_leaves_as_one() -> None:
    """Streams and logs are read by line."""
    assert to_wire(EngineError("a\n  b\tc")) == "INTERNAL: a b c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("two\nlines\r\tand more", "two lines and more"),
        ("\x1b[2Jgone\x07", r"\x1b[2Jgone\x07"),
        ("\u202etfel", r"\u202etfel"),
        ("\x00\x85\u2028", r"\x00"),
    ],
)
def test_what_callers_send_moves_no_cursor(text: str, shown: str) -> None:
    """No second line in a log, no code for a terminal, no text that runs the other way."""
    assert printable(text) == shown
    assert to_wire(InvalidRequest("id", text)) == f"INVALID_ARG: id: {shown}"


def test_a_long_text_keeps_its_ends() -> None:
    """Five million characters of a client's are not five megabytes of log."""
    text = printable(f"field: '{'x' * 5_000_000}' is not allowed")
    assert len(text) <= 2000
    assert text.startswith("field: 'xx") and text.endswith("xx' is not allowed")
    assert "characters left out" in text
    assert len(printable("\x1b" * 5_000_000, 100)) <= 100
