"""Answers as the ``openai`` package reads them, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.openai_server import MODEL, ScriptedBackend
from tests.helpers.scripted_text import PROMPT, drafted, prompt_ids, saying, tokenizer
from tests.helpers.waiting import with_room
from tests.openai.conftest import SAYS, Connect
from trtllm_bls import __version__
from trtllm_bls.orchestrator.orchestrator import Defaults
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings.parameters import STATUS_DIR
from trtllm_bls.triton.engine_service import publish_longest_sequence
from trtllm_bls.types import COLDEST, EngineCapacity, EngineChunk, EngineRequest

JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hi"}]
TOKENS = len(tokenizer().encode_word(SAYS))


def chatting(**script: Any) -> ScriptedEngine:
    """Says the same to the conversation."""
    prompt = tokenizer().render_chat(HELLO)
    ids = tokenizer().encode(prompt, add_special_tokens=False)
    return saying(SAYS, tokenizer().decode(ids[1:], skip_special_tokens=False), **script)


def events(url: str, **request: Any) -> list[dict[str, Any]]:
    """The stream's events as they were sent; it ends with [DONE]."""
    body = json.dumps({"model": MODEL, "stream": True, **request}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, JSON), timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        *lines, done, rest = answer.read().split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_a_chat_is_answered_in_one_piece(connect: Connect) -> None:
    """With its message, why it ended and how many tokens that took."""
    _, client = connect(chatting())
    began = int(time.time())
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    (choice,) = answer.choices
    assert choice.message.content == SAYS
    assert (choice.message.role, choice.message.refusal) == ("assistant", None)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS
    assert answer.usage.total_tokens == TOKENS + answer.usage.prompt_tokens
    assert answer.id.startswith("chatcmpl-")
    assert began <= answer.created <= time.time()
    ChatCompletion.model_validate(answer.model_dump(warnings="error"), strict=True)


def test_a_streamed_chat_has_one_role_its_text_and_one_end(connect: Connect) -> None:
    """In this order, and finish_reason is there, null, until the end."""
    api, client = connect(chatting())
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == SAYS
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    raw = events(f"{api.url}/v1/chat/completions", messages=HELLO)
    assert all("finish_reason" in choice for chunk in raw for choice in chunk["choices"])
    assert raw[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert raw[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in raw)
    for chunk in raw:
        ChatCompletionChunk.model_validate(chunk, strict=True)


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_figures_come_last_where_they_were_asked_for(connect: Connect, kind: str) -> None:
    """In a chunk without choices; in all others usage is null."""
    chat = kind.startswith("chat")
    api, _ = connect(chatting() if chat else saying(SAYS))
    prompt = {"messages": HELLO} if chat else {"prompt": PROMPT}
    *others, last = events(
        f"{api.url}/v1/{kind}", **prompt, max_tokens=5, stream_options={"include_usage": True}
    )
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


def test_a_completion_is_the_same_streamed_and_whole(connect: Connect) -> None:
    """Also from token ids, and of a reason that the last chunk of text has with it."""
    _, client = connect()
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (SAYS, "stop")
    by_ids = client.completions.create(model=MODEL, prompt=list(prompt_ids()), max_tokens=100)
    assert by_ids.choices == whole.choices
    stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=100, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == SAYS
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    for chunk in (whole, chunks[-1]):  # the others have null, as at OpenAI, which its type forgot
        Completion.model_validate(chunk.model_dump(warnings="error"), strict=True)


def test_a_completion_has_16_tokens_unless_it_says(connect: Connect) -> None:
    """A chat has as many as the model takes."""
    _, client = connect(saying("x" * 200, max_sequence_tokens=60))
    answer = client.completions.create(model=MODEL, prompt=PROMPT)
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert chat.usage is not None


def test_choices_are_numbered_by_prompt_and_n(connect: Connect) -> None:
    """Prompt by prompt; each prompt's tokens count once."""
    _, client = connect(
        ScriptedEngine(hashed(600, first=10), Script(vocab_size=tokenizer().vocab_size))
    )
    prompts = ["one", "two two", [5, 6, 7]]
    whole = client.completions.create(
        model=MODEL, prompt=prompts[:2], n=3, best_of=3, max_tokens=4, temperature=0
    )
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.choices[0].text == whole.choices[2].text != whole.choices[3].text
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    texts = [""] * 6
    ended = []
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts[:2], n=3, max_tokens=4, temperature=0, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ended += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ended) == list(range(6))
    of_ids = client.completions.create(model=MODEL, prompt=[[5, 6], [7]], max_tokens=2)
    assert of_ids.usage is not None and of_ids.usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_time_is_up_was_cut(connect: Connect, stream: bool) -> None:
    """OpenAI has no word for it; ``length`` says that there would have been more."""
    engine = saying(SAYS * 1000, step_seconds=0.01)
    # With a stop string, the answer is read token by token.
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10_000, "stop": ["never"]}

    def attempt(limit_s: float) -> Any:
        """The answer, or its last piece; ``None`` if no token came in time."""
        backend = ScriptedBackend(engine, defaults=Defaults(timeout_s=limit_s))
        _, client = connect(engine, backend=backend)
        try:
            if stream:
                *_, last = client.completions.create(**asked, stream=True)
                return last
            return client.completions.create(**asked)
        except openai.APIError as error:
            assert "no token before the time limit" in str(error)
            return None

    last = with_room(attempt, 0.3, 3.0, 30.0)
    assert last.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_each_prompt_once(connect: Connect, stream: bool) -> None:
    """However many choices it has; a token of each choice counts."""
    _, client = connect(saying(SAYS))
    prompt: Any = [list(prompt_ids()), list(prompt_ids()) * 2]
    asked: Any = {"model": MODEL, "prompt": prompt, "n": 3, "max_tokens": 4}
    if stream:
        options = {"include_usage": True}
        *_, last = client.completions.create(**asked, stream=True, stream_options=options)
        usage = last.usage
    else:
        usage = client.completions.create(**asked).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3 * len(prompt_ids()), 24)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_never_leave(connect: Connect, stream: bool) -> None:
    """A choice names the one that ended it; with the extension it stays in the text."""
    api, client = connect()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "stop": ["好,", "zzz"]}
    for include, expected in ((False, "jumped over 🙂 and 你"), (True, "jumped over 🙂 and 你好,")):
        body["include_stop_str_in_output"] = include
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(f"{api.url}/v1/completions", **body)]
        else:
            answer = client.post("/completions", cast_to=object, body=body)
            chunks = answer["choices"]  # type: ignore[index]
        assert "".join(chunk["text"] for chunk in chunks) == expected
        assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == ("stop", "好,")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front(connect: Connect, stream: bool) -> None:
    """Streamed too."""
    _, client = connect()
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, max_tokens=100, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + SAYS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_of_no_tokens_is_the_prompt_alone(
    connect: Connect, stream: bool, logprobs: int | None
) -> None:
    """As evaluations ask for the log-probs of a text."""
    _, client = connect()
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, max_tokens=0, logprobs=logprobs, stream=stream
    )
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert "".join(choice.text for choice in choices) == PROMPT
    assert choices[-1].finish_reason == "length"
    scored = [s for c in choices if c.logprobs for s in c.logprobs.token_logprobs or ()]
    assert len(scored) == (len(prompt_ids()) if logprobs else 0)
    assert scored[:1] == [None] * len(scored[:1]) and None not in scored[1:]


def test_texts_become_tokens_and_tokens_texts(connect: Connect) -> None:
    """As vLLM has it: of a prompt, of a conversation, and back."""
    api, _ = connect(saying(SAYS, max_sequence_tokens=60))

    def post(path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{api.url}/{path}", json.dumps(body).encode(), JSON)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    ids = list(prompt_ids(SAYS))
    said = {"count": len(ids), "max_model_len": 60, "tokens": ids, "token_strs": None}
    assert post("tokenize", model=MODEL, prompt=SAYS) == said
    more = post("tokenize", prompt=SAYS, add_special_tokens=False, return_token_strs=True)
    assert more["tokens"] == ids[1:]
    assert more["token_strs"] == [tokenizer().token(each) for each in ids[1:]]
    chat = tokenizer().render_chat(HELLO)
    found = post("tokenize", model=MODEL, messages=HELLO)
    assert post("detokenize", model=MODEL, tokens=found["tokens"]) == {"prompt": chat}
    assert post("tokenize", prompt="a" * 500)["count"] > 60
    with urllib.request.urlopen(f"{api.url}/version", timeout=60) as answer:
        assert json.load(answer) == {"version": __version__}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_a_chat_have_the_bytes_of_the_text(connect: Connect, stream: bool) -> None:
    """Joined, they are the content; the alternatives are as many as asked for."""
    _, client = connect(chatting())
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, temperature=0, stream=stream
    )
    entries, text = [], ""
    for part in answer if stream else [answer]:
        (choice,) = part.choices
        entries += (choice.logprobs and choice.logprobs.content) or []
        text += (choice.delta if stream else choice.message).content or ""
    assert text == SAYS
    assert bytes(byte for entry in entries for byte in entry.bytes or ()).decode() == SAYS
    assert len(entries) == TOKENS
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    assert {entry.logprob for entry in entries} == {0.0}


class Telling(ScriptedEngine):
    """Tells two likely ids beside each token, as TensorRT-LLM's own service does."""

    async def capacity(self) -> EngineCapacity:
        return replace(await super().capacity(), tells_top_log_probs=True)

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        wants = request.wants
        assert not wants.generation_logits
        plain = replace(request, wants=replace(wants, top_log_probs=0))
        async with aclosing(super()._chunks(plain)) as chunks:
            async for chunk in chunks:
                best = tuple(((token, -0.5), (7, -1.0)) for token in chunk.token_ids)
                yield replace(chunk, top_log_probs=best if wants.top_log_probs else None)


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_that_the_engine_tells_need_no_logits(connect: Connect, stream: bool) -> None:
    """In both shapes."""
    script = Script(vocab_size=tokenizer().vocab_size)
    _, client = connect(Telling(hashed(600, first=10), script))
    found = client.completions.create(
        model=MODEL, prompt=PROMPT, logprobs=2, max_tokens=3, temperature=0, stream=stream
    )
    scored = [part.choices[0].logprobs for part in (found if stream else [found])]
    best = [each for part in scored if part for each in part.top_logprobs or ()]
    assert len(best) == 3 and all(sorted(each.values())[0] == -1.0 for each in best)
    chat = client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert [entry.top_logprobs[0].token for entry in content] == [entry.token for entry in content]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_a_completion_know_their_place(connect: Connect, stream: bool) -> None:
    """Offsets in characters, over the echoed prompt too, whose first token has none."""
    _, client = connect()
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, logprobs=1, max_tokens=9, stream=stream
    )
    text, offsets, tokens, scores = "", [], [], []
    for part in answer if stream else [answer]:
        (choice,) = part.choices
        text += choice.text
        if choice.logprobs is not None:
            offsets += choice.logprobs.text_offset or []
            tokens += choice.logprobs.tokens or []
            scores += choice.logprobs.token_logprobs or []
    assert len(tokens) == len(offsets) == len(scores) == 9 + len(prompt_ids())
    assert scores[0] is None and None not in scores[1:]
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_zero_log_probs_are_those_of_the_chosen_tokens(connect: Connect) -> None:
    """0 is not off."""
    _, client = connect()
    answer = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=0, max_tokens=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs == [0.0, 0.0, 0.0]
    assert found.top_logprobs is None


def test_what_is_asked_of_the_engine(connect: Connect) -> None:
    """Fields of OpenAI's, and the usual ones beside them."""
    engine = saying(SAYS)
    _, client = connect(engine)

    def asked(**fields: Any) -> Any:
        client.completions.create(model=MODEL, prompt=PROMPT, **fields)
        return engine.requests[-1]

    sampling = asked().sampling
    assert (sampling.temperature, sampling.top_p, sampling.is_greedy) == (1.0, 1.0, False)
    assert sampling.seed is not None
    assert asked(temperature=0).sampling.is_greedy
    assert asked(top_p=0).sampling.is_greedy
    assert asked(extra_body={"top_k": 1}).sampling.temperature is None
    assert asked(top_p=COLDEST).sampling.temperature == 1.0
    sampling = asked(temperature=0.5, top_p=0.25, seed=-1, frequency_penalty=1.5).sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 2**64 - 1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (1.5, None)
    assert asked(logit_bias={"7": -100}).embedding_bias == ((7, -100.0),)
    more = {"top_k": 3, "min_tokens": 2, "repetition_penalty": 1.5, "ignore_eos": True}
    request = asked(extra_body={**more, "stop_token_ids": [9], "bad_words": [" over"]})
    assert (request.sampling.top_k, request.sampling.min_tokens) == (3, 2)
    assert request.sampling.repetition_penalty == 1.5
    assert request.bad_sequences
    assert not asked(logprobs=1).wants.context_logits
    assert asked(extra_body={"ignore_eos": True}).end_id == -1
    assert asked(extra_body={"top_k": -1}).sampling.top_k is None
    assert asked(extra_body={"min_p": 0.2}).sampling.min_p == 0.2
    assert asked(extra_body={"min_p": 0}).sampling.min_p is None
    assert asked(extra_body={"repetition_penalty": 1}).sampling.repetition_penalty is None
    assert asked(extra_body={"add_special_tokens": False}).input_ids == prompt_ids()[1:]
    asked(extra_body={"nobody_knows": 1, "service_tier": "auto", "min_p": 0}, user="me")


def test_conversations_reach_the_template_as_it_knows_them(connect: Connect) -> None:
    """Parts joined, developer as system, a last message that goes on."""
    engine = saying(SAYS)
    _, client = connect(engine)

    def prompt(messages: list[Any], **fields: Any) -> str:
        client.chat.completions.create(model=MODEL, messages=messages, extra_body=fields)
        return tokenizer().decode(engine.requests[-1].input_ids, skip_special_tokens=False)

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = prompt([{"role": "developer", "content": "Be kind"}, {"role": "user", "content": parts}])
    assert "<|system|>Be kind" in said and "<|user|>a\nb" in said
    assert said.endswith("<|assistant|>")
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(begun, **goes_on).endswith("It is")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    prompt([*HELLO, {"role": "assistant", "tool_calls": calls}])


def test_models_are_listed_and_found(connect: Connect) -> None:
    """Also a name with a slash; another one is 404."""
    _, client = connect(saying(SAYS, max_sequence_tokens=99), model_names=("org/name", "alias"))
    assert [model.id for model in client.models.list()] == ["org/name", "alias"]
    card = client.models.retrieve("org/name")
    assert (card.object, card.to_dict()["max_model_len"]) == ("model", 99)


async def test_an_engine_of_this_server_tells_how_long_a_sequence_it_takes(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its configuration does not say."""
    monkeypatch.setenv(STATUS_DIR, str(tmp_path))
    engine = saying(SAYS)
    _, client = connect(engine, status_dir=str(tmp_path))
    assert (await card_of(client))["max_model_len"] is None
    await publish_longest_sequence(saying(SAYS, max_sequence_tokens=77), engine.name)
    assert (await card_of(client))["max_model_len"] == 77
    StatusDirectory(tmp_path).clear()
    assert (await card_of(client))["max_model_len"] is None


async def test_a_length_that_cannot_be_told_is_said_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing, of which model, and why; the engine's model goes on."""
    monkeypatch.setenv(STATUS_DIR, str(tmp_path / "missing"))
    await publish_longest_sequence(saying(SAYS, max_sequence_tokens=77), "tensorrt_llm")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("tensorrt_llm: /v1/models does not tell its longest sequence: ")
    assert "missing" in said


async def card_of(client: openai.OpenAI) -> dict[str, object]:
    return (await asyncio.to_thread(client.models.retrieve, MODEL)).to_dict()


def test_a_stream_tells_which_text_accepted_drafts_wrote(connect: Connect) -> None:
    """Only to those who ask; the text is the same."""
    _, client = connect(drafted(chatting(), chatting()))
    both = [
        list(
            client.chat.completions.create(
                model=MODEL,
                messages=HELLO,
                temperature=0,
                stream=True,
                extra_body={"return_drafted": wanted},
            )
        )
        for wanted in (False, True)
    ]
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks) for chunks in both]
    assert texts == [SAYS, SAYS]
    assert all("drafted" not in chunk.choices[0].model_dump() for chunk in both[0])
    parts = [
        ((chunk.choices[0].delta.content or "")[begin:end], begin, end)
        for chunk in both[1]
        for begin, end in chunk.choices[0].model_dump().get("drafted", [])
    ]
    assert parts and all(text and end > begin for text, begin, end in parts)
    assert sum(len(text) for text, _, _ in parts) < len(SAYS)  # rounds end with the target's own
