"""What a text request asks of the engine, and what is refused before it is asked anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles.scripted import Script, ScriptedEngine
from tests.helpers.scripted_text import (
    PROMPT,
    ask,
    asking,
    prompt_ids,
    read,
    saying,
    text_of,
    tokenizer,
    tokenizer_with_a_prompt_table,
)
from tests.helpers.virtual_time import run_skipping_waits
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.types import FinishReason, Sampling, SpeculationRequest

# --- refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": ""}, "text_input"),
        ({"text": None}, "text_input"),
        ({"messages": "[]"}, "text_input"),
        ({"text": None, "messages": ""}, "messages"),
        ({"text": None, "messages": "{"}, "messages"),
        ({"text": None, "messages": "[" * 100_000}, "messages"),
        ({"text": None, "messages": "[]"}, "messages"),
        ({"text": None, "messages": '[{"role": "user", "content": "\\ud800"}]'}, "messages"),
        ({"text": "\ud800"}, "text_input"),
        ({"text": PROMPT * 20}, "text_input"),
        (
            {"text": None, "messages": '[{"role": "user", "content": "%s"}]' % (PROMPT * 20)},
            "messages",
        ),
        ({"stop_words": tuple(map(str, range(1000)))}, "stop_words"),
        ({"sampling": Sampling(beam_width=2)}, "beam_width"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    """Before the engine hears of it."""
    engine = saying("no", max_sequence_tokens=40)
    with pytest.raises(InvalidRequest) as caught:
        ask(engine, asking(**change))
    assert caught.value.field == field
    assert engine.requests == []


def test_a_prompt_is_as_long_as_both_limits_of_the_model_allow() -> None:
    """That of prompts, and that of prompt and answer, which leaves room for one new token."""
    long = len(prompt_ids())
    for prompts, sequences, fits in [
        (long, long + 9, True),
        (long - 1, long + 9, False),
        (long + 9, long + 1, True),
        (long + 9, long, False),
    ]:
        engine = saying("x", max_prompt_tokens=prompts, max_sequence_tokens=sequences)
        if fits:
            assert text_of(ask(engine, asking(max_tokens=None))) == "x"
            continue
        with pytest.raises(InvalidRequest, match=f"^text_input: {long} tokens; .* {long - 1} "):
            ask(engine)
        assert engine.requests == []


def test_beams_are_a_known_wish_that_cannot_be_granted() -> None:
    """The one refusal that is not the caller's mistake."""
    with pytest.raises(Unsupported):
        ask(saying("no"), asking(sampling=Sampling(beam_width=2)))


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    """No second begin-of-sequence token before it."""
    engine = saying("hi")
    messages = [{"role": "user", "content": "Hello"}]
    ask(engine, asking(None, messages=messages))
    rendered = "<|user|>Hello</s><|assistant|>"
    assert engine.requests[0].input_ids == tokenizer().encode(rendered, add_special_tokens=False)


def test_special_tokens_before_the_prompt_are_the_callers_choice() -> None:
    """The request's word goes before the deployment's."""
    bare = tokenizer().encode(PROMPT, add_special_tokens=False)
    engine = saying("hi")
    ask(engine, asking(add_special_tokens=False))
    ask(engine, defaults=Defaults(add_special_tokens=False))
    ask(engine, asking(add_special_tokens=True), defaults=Defaults(add_special_tokens=False))
    assert [request.input_ids for request in engine.requests] == [bare, bare, prompt_ids()]


def test_a_long_prompt_is_the_same_prompt() -> None:
    """It is tokenised beside the event loop, and otherwise as any other."""
    text = PROMPT * 1000
    engine = saying("hi", prompt=text)
    assert text_of(ask(engine, asking(text))) == "hi"
    assert engine.requests[0].input_ids == prompt_ids(text)


# --- what the engine is asked ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "fresh"),
    [
        (Sampling(temperature=0.8, top_k=0), False),
        (Sampling(temperature=0.8), False),
        (Sampling(top_k=5), True),
        (Sampling(top_p=0.5), True),
        (Sampling(), False),
        (Sampling(temperature=0.0), False),
        (Sampling(top_k=1, temperature=0.8), False),
        (Sampling(repetition_penalty=2.0), False),
    ],
)
def test_a_seed_is_drawn_where_sampling_is_asked_for_without_one(
    sampling: Sampling, fresh: bool
) -> None:
    """Each time another, and told in the ending; greedy decoding needs none."""
    engine = saying("hi")
    endings = [ask(engine, asking(sampling=sampling, max_tokens=1))[-1].ending for _ in range(2)]
    seeds = {request.sampling.seed for request in engine.requests}
    assert seeds == {found.seed for found in endings if found is not None}
    assert (len(seeds) == 2) is fresh
    assert (seeds == {None}) is not fresh


def test_a_prompt_tables_id_is_at_the_tokens_of_the_table() -> None:
    """They alone do not say of which table they are, which KV cache reuse has to know."""
    engine = saying("hi", PROMPT + "<|user|>")
    table = {"prompt_embedding_table": np.zeros((1, 4), np.float16)}
    request = asking(PROMPT + "<|user|>", prompt_table_extra_id=2**64 - 1, extras=table)
    ask(engine, request, other=tokenizer_with_a_prompt_table())
    (asked,) = engine.requests
    assert asked.extras["prompt_embedding_table"] is table["prompt_embedding_table"]
    ids = asked.extras["prompt_table_extra_ids"]
    assert ids.dtype == np.uint64 and len(ids) == len(asked.input_ids)
    assert ids.tolist() == [0] * (len(ids) - 1) + [2**64 - 1]
    ask(engine, asking(extras=table))
    assert asked.extras.keys() - engine.requests[1].extras.keys() == {"prompt_table_extra_ids"}


def test_a_temperature_alone_is_passed_on_as_it_is() -> None:
    """TensorRT-LLM stays greedy then, and so does this layer over it."""
    engine = saying("hi")
    ask(engine, asking(sampling=Sampling(temperature=0.8), max_tokens=1))
    assert engine.requests[0].sampling == Sampling(temperature=0.8)


def test_a_callers_seed_is_used() -> None:
    """Zero included."""
    engine = saying("hi")
    chunks = ask(engine, asking(sampling=Sampling(top_p=0.8, seed=0), max_tokens=1))
    assert chunks[-1].ending is not None and chunks[-1].ending.seed == 0
    assert engine.requests[0].sampling.seed == 0


@pytest.mark.parametrize("drafts", [0, 2])
def test_engine_requests_of_one_request_have_ids_of_their_own(drafts: int) -> None:
    """Each begins with the caller's, for the logs."""
    target, draft = saying("one two three four"), saying("one two three four", name="draft")
    asked = asking(speculation=SpeculationRequest(num_draft_tokens=drafts))
    ask(RoutingEngine(target, draft), asked)
    ids = [request.request_id for request in (*target.requests, *draft.requests)]
    assert len(set(ids)) == len(ids) and bool(drafts) == (len(ids) > 1)
    assert all(id.partition("-")[0] == "r" for id in ids)


def test_a_callers_seed_gives_the_same_text_whatever_else_runs() -> None:
    """How long adaptive drafts are depends on the load; without a seed they are drafted."""
    vocab_size = tokenizer().vocab_size
    chances = [0.0] * vocab_size
    chances[300:316] = [1 / 16] * 16
    sampling = Sampling(temperature=1.0, top_p=1.0)

    async def texts(seed: int | None) -> tuple[set[str], int]:
        found, drafted = set(), 0
        for others in (0, 2, 5, 12, 40):
            script = Script(vocab_size=vocab_size, step_seconds=0.02, batch_limit=16)
            quick = Script(vocab_size=vocab_size, step_seconds=0.001)
            target = ScriptedEngine(lambda _: chances, script)
            draft = ScriptedEngine(lambda _: chances, quick)
            engine = RoutingEngine(target, draft, by_default=True)
            asked = [
                asking(max_tokens=30, sampling=replace(sampling, seed=which))
                for which in (seed, *(None for _ in range(others)))
            ]
            answer, *_ = await asyncio.gather(*(read(engine, request) for request in asked))
            found.add(text_of(answer))
            counts = answer[-1].ending.speculation if answer[-1].ending else None
            drafted += counts.drafted if counts else 0
        return found, drafted

    (text, *more), drafted = run_skipping_waits(texts(5))
    assert text and not more and not drafted
    unseeded, drafted = run_skipping_waits(texts(None))
    assert len(unseeded) == 5 and drafted


def test_no_tokens_at_all_may_be_asked_for() -> None:
    """Engines have no smaller number than one, which is then not part of the answer."""
    (chunk,) = ask(saying("one two"), asking(max_tokens=0))
    assert chunk.text == "" and chunk.ending is not None
    assert (chunk.ending.finish_reason, chunk.ending.completion_tokens) == (FinishReason.LENGTH, 0)


def test_one_new_token_has_to_fit_behind_the_prompt() -> None:
    """A prompt as long as the model's longest sequence is refused, not sent."""
    longest = len(prompt_ids())
    with pytest.raises(InvalidRequest, match=r"text_input: .* so that one new token fits"):
        ask(saying("one two", max_sequence_tokens=longest), asking(max_tokens=None))
    chunks = ask(saying("one two", max_sequence_tokens=longest + 1), asking(max_tokens=None))
    assert chunks[-1].ending is not None and chunks[-1].ending.completion_tokens == 1


@pytest.mark.parametrize(("asked", "sent"), [(50, 5), (5, 5), (3, 3)])
def test_tokens_that_are_asked_for_as_far_as_they_fit(asked: int, sent: int) -> None:
    """The engine is asked for no more than there is room for behind the prompt."""
    engine = saying("one two", max_sequence_tokens=len(prompt_ids()) + 5)
    ask(engine, asking(max_tokens=asked, fits_max_tokens=True))
    assert engine.requests[0].max_tokens == sent


@pytest.mark.parametrize(("change", "streams"), [({}, False), ({"timeout_s": 60.0}, True)])
def test_an_answer_that_a_time_limit_may_cut_is_streamed_by_the_engine(
    change: dict[str, Any], streams: bool
) -> None:
    """Otherwise nothing would have arrived when the time is over."""
    engine = saying("one two")
    ask(engine, asking(**change))
    assert engine.requests[0].streaming is streams
