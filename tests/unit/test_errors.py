"""Errors on the wire: one line, the status first, and back to what they were."""

from __future__ import annotations

import inspect

import pytest

from trtllm_bls import errors
from trtllm_bls.errors import (
    ClientError,
    EngineError,
    EngineRefusal,
    EngineStalled,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    SetupError,
    ShuttingDown,
    Stopped,
    TrtllmBlsError,
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


# Other processes see these errors as another kind: the first of its bases that is none of them.
ONLY_HERE = (
    *(SetupError, ClientError, EngineUnavailable, EngineStalled, EngineRefusal),
    *(ShuttingDown, Stopped),
)


def made(kind: type[TrtllmBlsError], text: str) -> TrtllmBlsError:
    """An error of ``kind`` with every attribute set."""
    if kind is PromptTooLong:
        sizes = (50, 39) if "tokens" in text else (None, None)
        return PromptTooLong("input_ids", *sizes, text)
    if issubclass(kind, InvalidRequest):
        return kind("input_ids", text)
    if kind is Overloaded:
        return Overloaded.for_now(text, 7)
    return kind() if kind is ShuttingDown else kind(text)


@pytest.mark.parametrize(
    "text", ["no: really", "ends in [tokens=1 max_tokens=2]", "ends in []", "x"]
)
@pytest.mark.parametrize("kind", EVERY)
def test_every_error_comes_back_with_its_message_and_attributes(
    kind: type[TrtllmBlsError], text: str
) -> None:
    """So a chain of our models tells the caller the same as the model that raised it."""
    error = made(kind, text)
    back = from_wire(to_wire(error))
    assert back.wire_attributes == error.wire_attributes
    assert getattr(back, "field", None) == getattr(error, "field", None)
    if kind is Stopped:
        assert str(back) == f"CANCELLED: {text}" and type(back) is EngineError
        return
    assert (str(back), back.status) == (str(error), error.status)
    if kind is not TrtllmBlsError and not issubclass(kind, ONLY_HERE):
        assert type(back) is kind


def test_a_long_message_keeps_its_attributes() -> None:
    """The middle of a message is left out, never what a program reads."""
    back = from_wire(to_wire(Overloaded("x" * 10_000, retry_after_s=3)))
    assert isinstance(back, Overloaded) and back.retry_after_s == 3 and len(str(back)) <= 2000


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Exceeds maximum queue size", Overloaded),
        ("UNAVAILABLE: Maximum queue size of 4 is reached", Overloaded),
        ("Prompt length (9) exceeds maximum input length (8)", PromptTooLong),
    ],
)
def test_words_of_triton_and_tensorrt_llm_are_known(text: str, kind: type[TrtllmBlsError]) -> None:
    """Their codes are lost on a stream."""
    back = from_wire(text)
    assert type(back) is kind
    assert kind is PromptTooLong or back.wire_attributes == {"retry_after_s": 1}


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
        "UNAVAILABLE: full [retry_after_s=²]",
        "INVALID_ARG: input_ids: too long [tokens=9 max_tokens=⑤]",
        "UNAVAILABLE: full [retry_after_s=9999999999999999999]",
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
