"""Prompts as token ids, tokens beside their text, and what a chat template is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.scripted_text import (
    PROMPT,
    Collected,
    ask,
    asking,
    ending,
    orchestrator,
    prompt_ids,
    saying,
    text_of,
    tokenizer,
)
from tests.helpers.small_tokenizers import MAKERS, directory
from tests.helpers.waiting import run_async
from trtllm_bls.errors import InvalidRequest, PromptTooLong, Unsupported
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import ChatOptions, FinishReason, TextChunk, TokenText, Wants

SAYS = "jumped over 🙂 and 你好, twice."


def tokens_of(chunks: list[TextChunk]) -> list[TokenText]:
    return [token for chunk in chunks for token in chunk.tokens or ()]


def test_prompt_of_token_ids_reaches_the_engine_as_it_stands() -> None:
    """No token is put before or behind it."""
    engine = saying("yes")
    ids = prompt_ids()
    chunks = ask(engine, asking(text=None, prompt_ids=ids))
    assert text_of(chunks) == "yes"
    assert engine.requests[0].input_ids == ids


@pytest.mark.parametrize(
    ("ids", "kind"), [((), InvalidRequest), ((10**6,), InvalidRequest), ((1,) * 50, PromptTooLong)]
)
def test_prompt_ids_that_cannot_be_are_refused(ids: tuple[int, ...], kind: type) -> None:
    """Empty, outside the vocabulary, or more than the model takes."""
    with pytest.raises(kind, match="prompt_ids: "):
        ask(saying("no", max_sequence_tokens=40), asking(text=None, prompt_ids=ids))


def test_rows_of_a_prompt_table_are_ids_beyond_the_vocabulary() -> None:
    """As many as the table has rows. The next one is refused, and so are engines without tables."""
    prompts = orchestrator(saying("yes"))
    extras = {"prompt_embedding_table": np.zeros((2, 4), np.float16)}
    first = tokenizer().first_table_id
    ids = (first, first + 1)
    assert tuple(prompts.prompt_ids(asking(text=None, prompt_ids=ids, extras=extras))) == ids
    with pytest.raises(Unsupported, match="prompt_embedding_table: this engine reads no such"):
        ask(saying("yes"), asking(text=None, prompt_ids=ids, extras=extras))
    with pytest.raises(InvalidRequest, match=f"{first + 2} is not a token id"):
        prompts.prompt_ids(asking(text=None, prompt_ids=(first + 2,), extras=extras))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_bytes_of_the_tokens_are_the_text(kind: str, stream: bool) -> None:
    """Of every family of tokenizers, half characters included."""
    other = load_tokenizer(directory(kind))
    ids = other.encode_word(SAYS)
    prompt = other.encode(PROMPT, add_special_tokens=True)
    rule = reciting(ids, len(prompt), then=other.eos_id or 0)
    engine = ScriptedEngine(rule, Script(vocab_size=other.vocab_size))
    sink = Collected()
    request = asking(stream=stream, return_tokens=True)
    run_async(orchestrator(engine, other=other).run(request, sink))
    tokens = tokens_of(sink.chunks)
    assert [token.token_id for token in tokens] == list(ids)
    assert b"".join(token.data for token in tokens).decode() == text_of(sink.chunks)
    assert {token.log_prob for token in tokens} == {None}


def test_tokens_come_with_the_text_that_they_complete() -> None:
    """With their log-probs, and the echoed prompt's tokens before them."""
    request = asking(
        stream=True, echo=True, return_tokens=True, wants=Wants(log_probs=True), stop_words=("ice",)
    )
    chunks = ask(saying(SAYS), request)
    tokens = tokens_of(chunks)
    prompt = len(prompt_ids())
    assert all(token.log_prob is None for token in tokens[:prompt])
    assert all(token.log_prob is not None for token in tokens[prompt:])
    text = text_of(chunks)
    assert text.endswith("tw") and text.startswith(PROMPT)
    assert text.encode().startswith(b"".join(token.data for token in tokens))
    for chunk in chunks[:-1]:  # what a chunk shows is what its tokens are, but for held text
        assert len(b"".join(token.data for token in chunk.tokens or ())) <= len(text.encode())
    assert all(chunk.tokens is None for chunk in ask(saying(SAYS), asking(stream=True)))


def test_open_token_limit_is_what_the_model_has_room_for() -> None:
    """Where the request sets none."""
    chunks = ask(saying("x" * 200, max_sequence_tokens=40), asking(max_tokens=None))
    assert ending(chunks) == (FinishReason.LENGTH, None, 40 - len(prompt_ids()))
    for most in (7, 1000):  # the operator's limit where it is the smaller one
        defaults = Defaults(limits=RequestLimits(max_output_tokens=most))
        engine = saying("x" * 200, max_sequence_tokens=40)
        chunks = ask(engine, asking(max_tokens=None), defaults=defaults)
        assert ending(chunks)[2] == min(most, 40 - len(prompt_ids()))
        assert engine.requests[-1].max_tokens == ending(chunks)[2]


def test_stop_token_ids_end_beside_the_models_own() -> None:
    """Also where the model's own end id is switched off."""
    (*_, comma) = tokenizer().encode_word(",")
    request = asking(stop_token_ids=(comma,), end_id=-1)
    assert text_of(ask(saying("one, two"), request)) == "one"


def test_token_bias_reaches_the_engine_beside_that_of_words() -> None:
    """Each as a pair of id and weight."""
    engine, ((word,), words) = saying("x"), (tokenizer().word_ids("x"), (("x", 2.0),))
    ask(engine, asking(token_bias=((5, -100.0),)))
    ask(engine, asking(token_bias=((5, -100.0),), embedding_bias=words))
    assert engine.requests[0].embedding_bias == ((5, -100.0),)
    assert engine.requests[1].embedding_bias == ((word, 2.0), (5, -100.0))


@pytest.mark.parametrize("tells", [False, True])
def test_the_likeliest_ids_are_asked_for_as_the_engine_can_tell_them(tells: bool) -> None:
    """By themselves, or by the logits of each place, which are far larger."""
    engine = saying("x")
    engine._capacity = replace(engine._capacity, tells_top_log_probs=tells)
    ask(engine, asking(wants=Wants(log_probs=True, top_log_probs=2)))
    wants = engine.requests[0].wants
    assert (wants.top_log_probs, wants.generation_logits) == ((2, False) if tells else (0, True))


def rendered(**options: Any) -> str:
    engine, messages = saying("x"), [{"role": "user", "content": "Hi"}]
    request = asking(text=None, messages=messages, **options)
    ask(engine, request)
    return tokenizer().decode(engine.requests[0].input_ids, skip_special_tokens=False)


def test_chat_options_reach_the_template() -> None:
    """Whether the answer begins a message of its own, or goes on with the last."""
    assert rendered().endswith("<|assistant|>")
    assert not rendered(chat=ChatOptions(add_generation_prompt=False)).endswith("<|assistant|>")
    goes_on = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert rendered(chat=goes_on).endswith("Hi")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "return_tensors"])
def test_arguments_of_the_template_engine_are_no_variables(name: str) -> None:
    """A caller cannot bring a template of its own that way."""
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: {name}"):
        rendered(chat=ChatOptions(variables={name: "x"}))
