"""Frames built by hand are what ``json`` would write."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.scripted_text import prompt_ids, tokenizer
from tests.helpers.small_tokenizers import directory
from trtllm_bls.openai.builder import (
    CompletionLogprobs,
    Frames,
    Head,
    TokenScores,
    chat_logprobs,
    token_string,
)
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import TextChunk, TokenText

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
        if not token_string(token.data).startswith("bytes:"):
            assert text[offset:].startswith(token_string(token.data))


def test_log_probs_are_of_the_logits_of_the_place_before() -> None:
    """Of a prompt's tokens and of new ones; padding behind the vocabulary is no alternative."""
    size = tokenizer().vocab_size
    first, second, third = prompt_ids()[:3]
    probabilities = np.zeros((3, size + 64))
    probabilities[0, [second, 5]] = 0.25, 0.75
    probabilities[1, [third, 6, size + 1]] = 0.125, 0.375, 0.5
    probabilities[2, [7, size + 1]] = 0.5, 0.5
    with np.errstate(divide="ignore"):
        rows = np.log(probabilities)
    chunk = TextChunk("xxx(")
    prompt = [TokenText(token, b"x", None) for token in (first, second, third)]
    chunk.tokens = (*prompt, TokenText(7, b"(", math.log(0.5)))
    chunk.context_logits, chunk.generation_logits = rows[:2], [rows[2]]
    scores = TokenScores(tokenizer(), 2).of(chunk)
    told = [math.exp(token.log_prob) for token, _ in scores if token.log_prob is not None]
    assert told == pytest.approx([0.25, 0.125, 0.5])
    entries = [each["top_logprobs"] for each in chat_logprobs(scores)["content"]]
    assert entries[0] == []
    assert [best["token"] for best, _ in entries[1:]] == ["&", "'", "("]
    likeliest = [math.exp(best["logprob"]) for best, _ in entries[1:]]
    assert likeliest == pytest.approx([0.75, 0.375, 0.5])
    assert entries[3][1]["logprob"] == -9999.0  # JSON has no minus infinity


@given(st.permutations(range(1, 9)), st.integers(1, 8))
def test_alternatives_are_the_likeliest_in_their_order(weights: list[int], count: int) -> None:
    """Computed from logits, in whatever order the vocabulary has them."""
    logits = np.full(tokenizer().vocab_size, -np.inf)
    logits[: len(weights)] = weights
    chunk = TextChunk("x")
    chunk.tokens, chunk.generation_logits = (TokenText(1, b"x", -1.0),), [logits]
    ((_, alternatives),) = TokenScores(tokenizer(), count).of(chunk)
    found = [log_prob for _, log_prob in alternatives]
    assert len(found) == count and found == sorted(found, reverse=True)
    assert found[0] - found[-1] == pytest.approx(count - 1)


def test_alternatives_are_no_more_than_the_vocabulary_has() -> None:
    """A small one may have fewer tokens than a caller asks for."""
    size = tokenizer().vocab_size
    chunk = TextChunk("x")
    chunk.tokens, chunk.generation_logits = (TokenText(1, b"x", -1.0),), [np.zeros(size)]
    ((_, alternatives),) = TokenScores(tokenizer(), size + 5).of(chunk)
    assert len(alternatives) == size


def test_alternatives_are_spelled_as_in_the_middle_of_a_text() -> None:
    """Where the first token of a text loses its space."""
    other = load_tokenizer(directory("sentencepiece"))
    (token,) = other.encode_word(" quick")[-1:]
    chunk = TextChunk("quick")
    chunk.tokens = (TokenText(token, b"quick", -1.0, ((token, -1.0),)),)
    ((_, alternatives),) = TokenScores(other, 1).of(chunk)
    assert alternatives == [(b" quick", -1.0)]


def test_alternatives_have_the_chosen_token_beside_them() -> None:
    """Also where it is none of the likeliest."""
    token = TokenText(1, b"c", -3.0)
    found = CompletionLogprobs().next([(token, [(b"a", -0.5), (b"b", -1.0)])])
    assert found["top_logprobs"] == [{"a": -0.5, "b": -1.0, "c": -3.0}]
