"""Frames built by hand are what ``json`` would write."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_bls.openai.logprobs import CompletionLogprobs, spelled
from trtllm_bls.openai.responses import Frames, Head
from trtllm_bls.types import TokenText

HEAD = Head(id='cmpl-"1"', object="object", created=5, model='a "model"\\', system_fingerprint="fp")
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@given(text=TEXTS, index=st.integers(0, 127))
def test_a_frame_is_one_line_of_json(delta: bool, usage: bool, text: str, index: int) -> None:
    """Whatever the text holds: quotes, line ends, control characters."""
    kind = "chat.completion.chunk" if delta else "text_completion"
    frames = Frames(msgspec.structs.replace(HEAD, object=kind), usage=usage)
    value = {"delta": {"content": text}} if delta else {"text": text}
    expected = {
        **{"id": HEAD.id, "object": kind, "created": 5, "model": HEAD.model},
        "system_fingerprint": "fp",
        "choices": [{"index": index, **value, "logprobs": None, "finish_reason": None}],
        **({"usage": None} if usage else {}),
    }
    frame = frames.text(index, text)
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n")
    assert b"\n" not in frame[:-2] and b"\r" not in frame
    assert json.loads(frame[6:]) == expected
    same = frames.choice(index, **value, logprobs=None, finish_reason=None)
    assert json.loads(same[6:]) == expected
    expected["choices"][0]["logprobs"] = {"content": []}  # type: ignore[index]
    scored = frames.choice(index, **value, logprobs={"content": []}, finish_reason=None)
    assert json.loads(scored[6:]) == expected


@given(text=TEXTS, cuts=st.lists(st.integers(0, 60)))
def test_offsets_are_where_the_text_of_a_token_begins(text: str, cuts: list[int]) -> None:
    """Also where a character is spread over tokens, and over chunks."""
    data = text.encode()
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    begins = [0, *ends[:-1]]
    tokens = [TokenText(1, data[a:b], 0.0) for a, b in zip(begins, ends, strict=True)]
    logprobs = CompletionLogprobs()
    offsets = []
    for token in tokens:
        offsets += logprobs.next([(token, [])])["text_offset"]
    assert offsets == [len(data[:begin].decode("utf-8", "ignore")) for begin in begins]
    for token, offset in zip(tokens, offsets, strict=True):
        if not spelled(token.data).startswith("bytes:"):
            assert text[offset:].startswith(spelled(token.data))
