"""Bounds of what is told about an answer, and about a prompt that is too long."""

from __future__ import annotations

from trtllm_bls.errors import PromptTooLong
from trtllm_bls.openai.api_errors import api_error
from trtllm_bls.openai.builder import TokenSpans
from trtllm_bls.types import TokenText


def token(data: bytes) -> TokenText:
    return TokenText(7, data, None)


def test_a_token_belongs_to_the_part_in_which_it_begins() -> None:
    """One that begins where a part ends is the next part's."""
    spans = TokenSpans()
    spans.add([token(b"ab"), token(b"cd"), token(b"ef")], ["first", "second", "third"])
    assert spans.take(0, 2) == ["first"]
    assert spans.take(2, 6) == ["second", "third"]


def test_a_models_context_has_room_for_one_new_token() -> None:
    """The longest prompt leaves room for one token of the answer."""
    error = api_error(PromptTooLong("text_input", 120, 99), "messages", None)
    assert error.message.startswith("This model's maximum context length is 100 tokens. ")
