"""One answer is the same through every API, however its text is cut; prompts too."""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.openai_server import MODEL
from tests.helpers.scripted_text import tokenizer
from tests.models.test_chat_templates import tokenizer_of
from tests.text.test_chat_parsing import TEXTS
from trtllm_bls.errors import InvalidRequest
from trtllm_bls.openai.builder import ResponseBuilder
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.conversation import ChatModel, Transcript
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import ChatCompletionRequest, decode
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.json_values import json_value
from trtllm_bls.text.turn_order import TurnOrder
from trtllm_bls.types import Ending, FinishReason, TextChunk, TokenText

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>'
PIECES = st.sampled_from(
    [CALL, "<think>", "</think>", "Why?\n", "é🙂", " ", "<tool_call>", '{"name": "f"', "text \n"]
)
# (reasoning, text, calls) of an answer
Content = tuple[str, str, list[tuple[str, str]]]


def builders(stream: bool, formats: ChatFormats) -> list[ResponseBuilder]:
    """A builder of each API, for the same question."""
    turn = {"role": "user", "content": "x"}
    function = {"name": "f", "parameters": SCHEMA}
    asked: list[tuple[Any, Any, dict[str, Any]]] = [
        (
            ChatCompletionRequest,
            ChatResponse,
            {"messages": [turn], "tools": [{"type": "function", "function": function}]},
        ),
        (
            ResponsesRequest,
            ResponsesResponse,
            {"input": "x", "tools": [{"type": "function", **function}]},
        ),
        (
            MessagesRequest,
            MessagesResponse,
            {
                "messages": [turn],
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA}],
            },
        ),
    ]
    found = []
    for kind, builder, fields in asked:
        body = json.dumps({"model": MODEL, "stream": stream, **fields}).encode()
        found.append(
            builder(decode(body, kind), ChatModel(tokenizer(), ChatTurns(tokenizer(), formats)))
        )
    return found


def content_of(builder: ResponseBuilder, stream: bool, chunks: list[str]) -> Content:
    """What the client of this API ends up with."""
    ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9)
    sent = b"".join(builder.add(0, TextChunk(text)) for text in chunks[:-1])
    sent += builder.add(0, TextChunk(chunks[-1], 0, ending))
    if not stream:
        return read_whole(json.loads(builder.whole()))
    sent += builder.last_events()
    lines = [line[6:] for line in sent.split(b"\n") if line.startswith(b"data: {")]
    return READ[type(builder)]([json.loads(line) for line in lines])


def read_whole(answer: dict[str, Any]) -> Content:
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", [])]
        told = [(call["name"], call["arguments"]) for call in calls]
        return message.get("reasoning_content", ""), message["content"] or "", told
    reasoning, text, called = "", "", []
    for item in answer["output" if "output" in answer else "content"]:
        if item["type"] == "reasoning":
            reasoning += item["content"][0]["text"]
        elif item["type"] == "thinking":
            reasoning += item["thinking"]
        elif item["type"] == "message":
            text += item["content"][0]["text"]
        elif item["type"] == "text":
            text += item["text"]
        else:
            called.append((item["name"], item.get("arguments", item.get("input"))))
    return reasoning, text, called


def read_chat(events: list[dict[str, Any]]) -> Content:
    reasoning, text, calls = "", "", []
    for event in events:
        delta = event["choices"][0]["delta"]
        reasoning += delta.get("reasoning_content", "")
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return reasoning, text, [(name, arguments) for name, arguments in calls]


def read_responses(events: list[dict[str, Any]]) -> Content:
    parts: dict[str, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            parts[event["item"]["id"]] = [event["item"], ""]
        elif event["type"].endswith(".delta"):
            parts[event["item_id"]][1] += event["delta"]
    found = list(parts.values())
    return (
        "".join(text for item, text in found if item["type"] == "reasoning"),
        "".join(text for item, text in found if item["type"] == "message"),
        [(item["name"], text) for item, text in found if item["type"] == "function_call"],
    )


def read_messages(events: list[dict[str, Any]]) -> Content:
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            keys = ("text", "thinking", "partial_json")
            blocks[event["index"]][1] += "".join(event["delta"].get(key, "") for key in keys)
    return (
        "".join(text for block, text in blocks if block["type"] == "thinking"),
        "".join(text for block, text in blocks if block["type"] == "text"),
        [(block["name"], text) for block, text in blocks if block["type"] == "tool_use"],
    )


READ = {
    ChatResponse: read_chat,
    ResponsesResponse: read_responses,
    MessagesResponse: read_messages,
}


def loaded(content: Content) -> Content:
    """With arguments as the Messages API has them in a whole answer: as objects."""

    def read(arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        found = json_value(arguments)
        return found if isinstance(found, dict) else {"arguments": arguments}

    reasoning, text, calls = content
    return reasoning, text, [(name, read(arguments)) for name, arguments in calls]


def parts(content: Content) -> Content:
    """Chats have one text of a kind, with empty lines between its parts; other APIs several."""
    reasoning, text, calls = loaded(content)
    return reasoning.replace("\n\n", ""), text.replace("\n\n", ""), calls


@given(st.lists(PIECES, min_size=1, max_size=8), st.data())
def test_an_answer_is_the_same_through_every_api(pieces: list[str], data: st.DataObject) -> None:
    """Text, reasoning and calls, streamed in any chunks and whole."""
    text = "".join(pieces)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    borders = [0, *sorted(places), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(borders)]
    formats = ChatFormats(TOOL_FORMATS["hermes"], REASONING_TAGS["think"])
    streamed = [content_of(builder, True, chunks) for builder in builders(True, formats)]
    assert [parts(each) for each in streamed[1:]] == [parts(streamed[0])] * 2
    whole = [content_of(builder, False, [text]) for builder in builders(False, formats)]
    assert whole[0] == streamed[0]
    assert [parts(each) for each in whole] == [parts(streamed[0])] * 3


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_calls_of_every_family_are_the_same_through_every_api(family: str) -> None:
    """In pieces and whole."""
    reasoning = REASONING_TAGS.get(family, REASONING_TAGS["think"])
    formats = ChatFormats(TOOL_FORMATS[family], reasoning)
    for text in (text.replace("weather", "f") for name, text, _ in TEXTS if name == family):
        for size in (1, 5, len(text)):
            chunks = [text[place : place + size] for place in range(0, len(text), size)]
            streamed = [content_of(builder, True, chunks) for builder in builders(True, formats)]
            assert streamed[0][2] and streamed[1:] == streamed[:1] * 2
        whole = [loaded(content_of(builder, False, [text])) for builder in builders(False, formats)]
        assert whole == [loaded(streamed[0])] * 3


def test_the_model_s_own_ids_of_calls_reach_clients() -> None:
    """Kimi's template wants them back."""
    text = next(text for name, text, _ in TEXTS if name == "kimi_k2").replace("weather", "f")
    ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9)
    for builder in builders(False, ChatFormats(TOOL_FORMATS["kimi_k2"])):
        builder.add(0, TextChunk(text, 0, ending))
        assert b'"functions.f:0"' in builder.whole()


@pytest.mark.parametrize(("stop", "reason"), [("END", "stop_sequence"), (None, "end_turn")])
def test_messages_names_a_stop_sequence_only_where_the_engine_does(
    stop: str | None, reason: str
) -> None:
    """Some engines say "stop" of every end that is not a limit's."""
    ending = Ending(
        finish_reason=FinishReason.STOP, stop_reason=stop, prompt_tokens=1, completion_tokens=9
    )
    *_, builder = builders(False, ChatFormats())
    builder.add(0, TextChunk("text", 0, ending))
    answer = json.loads(builder.whole())
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)


TURNS = [
    {"role": "system", "content": "FIRST"},
    {"role": "system", "content": "SECOND"},
    {"role": "user", "content": "QUESTION"},
    {"role": "system", "content": "THIRD"},
    {"role": "user", "content": "MORE"},
    {"role": "assistant", "content": "ANSWER"},
    {"role": "user", "content": "LAST"},
]
LOOP = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
REFUSING = {
    "systems in the middle": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first') }}{% endif %}{% endfor %}" + LOOP,
    "systems that are dropped": "<|system|>{{ messages[0].content }}{% for m in messages[1:] %}"
    "{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}",
    "turns that do not alternate": "{% for m in messages %}{% if not loop.first and "
    "m.role == messages[loop.index0 - 1].role %}{{ raise_exception('alternate') }}{% endif %}"
    "{% endfor %}" + LOOP,
    "any system": "{% for m in messages %}{% if m.role == 'system' or not loop.first and "
    "m.role == messages[loop.index0 - 1].role %}{{ raise_exception('none') }}{% endif %}"
    "{% endfor %}" + LOOP,
}


@pytest.mark.parametrize("name", REFUSING)
def test_a_template_gets_the_conversation_in_a_form_that_it_takes(name: str) -> None:
    """Nothing is lost: not a text of a system, and not the order of the turns."""
    reader = tokenizer_of(REFUSING[name])
    with_all = TurnOrder.of(reader).fitted(TURNS)
    prompt = reader.render_chat(with_all)
    places = [prompt.index(turn["content"]) for turn in TURNS]
    systems = [places[n] for n in (0, 1, 3)]
    turns = [places[n] for n in (2, 4, 5, 6)]
    assert systems == sorted(systems) and turns == sorted(turns)
    assert max(systems) < min(turns)


def test_a_template_that_takes_all_gets_all_as_it_is() -> None:
    """A text that moves to the front would change the beginning of the prompt, and its KV cache."""
    order = TurnOrder.of(tokenizer_of(LOOP))
    assert order.systems and order.users and order.answers and order.greeting
    assert order.fitted(TURNS) == TURNS


def test_a_model_without_a_template_is_not_asked() -> None:
    """Every conversation is refused, by the prompt that cannot be made."""
    reader = tokenizer_of(LOOP)
    reader.hf.chat_template = None
    order = TurnOrder.of(reader)
    assert not any(asdict(order).values())
    with pytest.raises(InvalidRequest, match="no chat template"):
        reader.render_chat(order.fitted(TURNS))


@pytest.mark.parametrize("turns", [10, 1000])
def test_texts_of_many_turns_are_copied_once(turns: int) -> None:
    """Otherwise 4 MB in thousands of turns would hold up every stream for seconds."""
    size = 4_000_000 // turns
    texts = [chr(97 + n % 26) * size for n in range(turns)]
    users = [{"role": "user", "content": text} for text in texts]
    transcript = Transcript()
    for text in texts:
        transcript.say("assistant", text)
        transcript.think(text)
    tracemalloc.start()
    try:
        (joined,) = TurnOrder(users=False).fitted(users)
        (message,) = transcript.messages
        copied = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert joined["content"] == "\n\n".join(texts)
    assert (message["content"], message["reasoning"]) == ("\n".join(texts), "".join(texts))
    assert message["reasoning_content"] == message["reasoning"] and copied < 14_000_000


THOUGHT = "<think>Two and two are four"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "is_cut"), [(THOUGHT, True), (f"{THOUGHT}</think>4", False)])
def test_where_an_answer_ended_is_told_alike(stream: bool, text: str, is_cut: bool) -> None:
    """Inside the reasoning, by the limit of tokens, or behind it, by itself."""
    formats = ChatFormats(reasoning=REASONING_TAGS["think"])
    reason = FinishReason.LENGTH if is_cut else FinishReason.END_ID
    ids = tokenizer().encode(text, False)
    detokenizer = tokenizer().detokenizer(skip_special_tokens=False)
    pieces = [detokenizer.feed_one(token) for token in ids]
    tokens = [TokenText(token, data, None) for token, (_, data) in zip(ids, pieces, strict=True)]
    said = "".join(piece for piece, _ in pieces)
    ending = Ending(finish_reason=reason, prompt_tokens=1, completion_tokens=9)
    told = {}
    for builder in builders(stream, formats):
        events = builder.add(0, TextChunk(said, 0, ending, tokens=tuple(tokens)))
        events += builder.last_events() if stream else builder.whole()
        told[type(builder)] = events.decode()
    assert ('"finish_reason":"length"' in told[ChatResponse]) is is_cut
    assert ('"status":"incomplete"' in told[ResponsesResponse]) is is_cut
    assert ('"stop_reason":"max_tokens"' in told[MessagesResponse]) is is_cut
    counts = re.findall(r'"reasoning_tokens":(\d+)', told[ResponsesResponse])
    inside = tokenizer().encode(" and two are four", False)
    assert len(inside) <= int(counts[-1]) < len(ids)
    if not stream:  # a stream of a chat tells usage where it is asked to
        assert re.findall(r'"reasoning_tokens":(\d+)', told[ChatResponse]) == counts
