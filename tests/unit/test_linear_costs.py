"""No text of a client, a model or an engine costs more than linear time.

What is fed is collected from the code: every family of tool calls, and every method that takes
text, ids or bytes piece by piece. A new one fails here until it is fed. Regular expressions are in
``test_linear_patterns.py``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.growth import MOST, growth
from tests.helpers.hostile_text import MARKS, SIZE, modules
from tests.helpers.scripted_text import tokenizer
from tests.helpers.tiers import budget, pairs
from tests.helpers.waiting import run_async
from tests.text.test_chat_parsing import TEXTS
from tests.unit.test_grpc_protocol import connected, exchange, headers
from trtllm_bls.errors import InvalidRequest, SetupError
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import ChatCompletionRequest, decode
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.orchestrator.orchestrator import Admission
from trtllm_bls.orchestrator.reports import REQUESTS, RequestMetrics
from trtllm_bls.settings.model_config import read_config
from trtllm_bls.settings.request_limits import RequestLimits
from trtllm_bls.speculative.ngrams import DraftMemory
from trtllm_bls.text.answer import Answer, TextRules
from trtllm_bls.text.chat_formats import FORCED, REASONING_TAGS, TOOL_FORMATS, ToolFormat
from trtllm_bls.text.chat_parser import ChatParser
from trtllm_bls.text.checkpoint_dir import config_vocab_size
from trtllm_bls.text.json_values import MAX_DEPTH
from trtllm_bls.text.reasoning import ReasoningState
from trtllm_bls.text.stopping import MAX_STOP_CHARS, StopMatcher, StoppingCriteria
from trtllm_bls.text.tokenizer import _one_call_a_turn
from trtllm_bls.triton.tensors import ChunkWriter
from trtllm_bls.types import (
    AnswerMarkup,
    ChatOptions,
    Ending,
    EngineChunk,
    FinishReason,
    Guide,
    Outcome,
    RequestStats,
    Sampling,
    TextChunk,
    TextRequest,
)
from trtllm_bls.wire.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    MAX_MESSAGE_BYTES,
    SETTINGS,
    UPDATE,
    frame,
    number_frame,
)

# --- chats -----------------------------------------------------------------------------------


def fed(parser: ChatParser, text: str, piece: int) -> None:
    for place in range(0, len(text), piece):
        parser.feed(text[place : place + piece])
    parser.flush()


def heads_of(family: str) -> list[str]:
    """The beginnings of calls, one up to each kind of mark in them."""
    found = [""]
    for text in [text for name, text, _ in TEXTS if name == family][:2]:
        cuts = [match.end() for match in re.finditer(r"\W+|\w+", text)]
        found += [text[:cut] for cut in cuts[:: max(1, len(cuts) // 4)]]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("family, piece", pairs([*TOOL_FORMATS, "forced"], [1, 10**9]))
def test_no_text_of_a_model_is_read_more_than_once(family: str, piece: int) -> None:
    """In any state of any family, whole and in pieces of one character."""
    tools: ToolFormat = FORCED if family == "forced" else TOOL_FORMATS[family]
    tags = REASONING_TAGS.get(family, REASONING_TAGS["think"])
    own = [*tools.begin, *tools.noise, tags.end, "</arg_value> ", "</parameter>\n", "[f(a=1)"]
    marks = (*(MARKS[:4] if piece == 1 else MARKS), *own[:: 2 if piece == 1 else 1])

    def work(head: str, mark: str, size: int) -> Callable[[], object]:
        schemas = {"weather": {"properties": {"city": {"type": "string"}}}, "f": {}}
        text = head + mark * (size // len(mark))
        return lambda: fed(ChatParser(tools, tags, schemas=schemas), text, piece)

    # Quadratic work on 16 times SIZE characters is found by the tenth of a second that it takes.
    size = SIZE // 2 if piece == 1 else budget(SIZE, 4 * SIZE)
    for head, mark in pairs(heads_of(family), marks):
        grown = growth(partial(work, head, mark), size)
        assert grown <= MOST, f"{head!r} and {mark!r} again and again: {grown:.0f} times"


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_patterns_of_families_have_a_bound(family: str) -> None:
    """The beginning of a match is read again with each piece, so it must not grow."""
    each = TOOL_FORMATS[family]
    for text in (each.header, each.key, each.line_key, each.closer, each.stray, each.loose):
        assert not re.search(r"(?<!\\)[*+](?!\+)(?<!\}\+)|\{\d+,\}", re.sub(r"\[.*?\]", "", text))


def test_python_literals_with_equal_hashes() -> None:
    """A model may choose numbers that a table keeps in one place."""

    def work(size: int) -> Callable[[], object]:
        pairs = ",".join(f"{number * (2**61 - 1)}:1" for number in range(size // 16))
        text = f"[weather(a={{{pairs}}})]"
        return lambda: fed(ChatParser(TOOL_FORMATS["pythonic"]), text, 10**9)

    assert growth(work, 4 * SIZE) <= MOST
    parser = ChatParser(TOOL_FORMATS["pythonic"])
    text = "[weather(a={0, 1})]"  # a set, which JSON does not have
    assert "".join(event.text for event in parser.feed(text, end=True)) == text


# --- what else is fed piece by piece ------------------------------------------------------------

_FED = ("feed", "feed_one", "receive", "extend", "propose", "guard", "guard_parts")


def answer(stream: bool, size: int, **more: Any) -> Callable[[], object]:
    request = TextRequest(
        request_id="", text="x", max_tokens=size, sampling=Sampling(), stream=stream, **more
    )
    rules = TextRules(prompt_tokens=1, max_tokens=size)
    reader = tokenizer()
    word = reader.encode("a<", add_special_tokens=False)

    def run() -> None:
        made = Answer(request, rules, [reader.detokenizer()])
        for place in range(size - 1):
            token = word[place % len(word)]
            made.feed([EngineChunk(token_ids=(token,), log_probs=(-1.0,))])
        made.end(FinishReason.STOP)

    return run


def stops(words: list[str], mark: str, size: int) -> Callable[[], object]:
    def run() -> None:
        matcher = StopMatcher(words)
        for char in mark * (size // len(mark)):
            matcher.feed(char)
        StopMatcher(words).feed(mark * (size // len(mark)))

    return run


def reasoning(header_end: str, head: str, mark: str, piece: int, size: int) -> Callable[[], object]:
    markup = AnswerMarkup(
        reasoning_begin="<think>", reasoning_end="</think>", header_end=header_end
    )
    text = head + mark * (size // len(mark))

    def run() -> None:
        state = ReasoningState(markup)
        for place in range(0, size, piece):
            state.feed(text[place : place + piece])
        state.flush()

    return run


def criteria(size: int) -> Callable[[], object]:
    ids = (5,) * 60

    def run() -> None:
        made = StoppingCriteria(10**9, end_ids=(1,), stop_sequences=[(*ids[:n], 6) for n in ids])
        for _ in range(size):
            made.feed((5,))

    return run


def drafts(numbers: int, size: int) -> Callable[[], object]:
    def run() -> None:
        memory = DraftMemory(1 << 20)
        for place in range(0, size, 64):
            memory.add([n % numbers for n in range(64)], float(place))
            for text in memory.texts(0.0):
                text.extend()

    return run


def engine_frames(made: Callable[[int], list[bytes]], size: int) -> Callable[[], object]:
    """Frames for a connection with many streams that all have more to send."""
    client, server = connected()
    exchange(client, server)
    streams = [client.open(headers()) for _ in range(size // 4)]
    for stream in streams:
        client.send(stream, bytes(100))
    frames = b"".join(made(size // 4))

    def run() -> None:
        for place in range(0, len(frames), 1 << 12):
            received = client.receive(frames[place : place + (1 << 12)])
            assert received.failure is None
            client.bytes_to_send()

    return run


def settings_frames(number: int) -> list[bytes]:
    entry = b"\0\4\0\0\0\0" + b"\0\4\0\0\0\1"
    return [frame(SETTINGS, 0, 0, entry) for _ in range(number)]


def shut_windows(number: int) -> list[bytes]:
    return [
        frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0"),
        *[number_frame(UPDATE, 2 * n + 1, 1) for n in range(number)],
    ]


def goaways(number: int) -> list[bytes]:
    return [
        frame(GOAWAY, 0, 0, (2 * n + 1).to_bytes(4, "big") + bytes(4)) for n in range(number, 0, -1)
    ]


def continued(number: int) -> list[bytes]:
    number = min(number, 1 << 12)
    begin = frame(HEADERS, 0, 1, b"")
    return [begin, *[frame(CONTINUATION, 0, 1, b"x") for _ in range(number)]]


def writer(size: int) -> Callable[[], object]:
    from trtllm_bls.types import EngineRequest

    asked = EngineRequest(
        request_id="", input_ids=(1,), max_tokens=size, sampling=Sampling(), streaming=True
    )

    def run() -> None:
        chunks = ChunkWriter(asked, True, None)
        for _ in range(size):
            chunks.arrays(EngineChunk(token_ids=(1,), log_probs=(-1.0,)))

    return run


def guarded(value: Callable[[int], Any], size: int) -> Callable[[], object]:
    guard = tokenizer()._chat_guards[1]
    made = value(size)

    def run() -> None:
        with suppress(InvalidRequest):
            guard.guard("messages", made)

    return run


def guide(text: Callable[[int], str], size: int) -> Callable[[], object]:
    made = Guide("json_schema", text(size))
    limits = RequestLimits(max_guide_bytes=1 << 30)

    def run() -> None:
        with suppress(InvalidRequest):
            limits.check_guide(made)

    return run


def waiters(last_first: bool, size: int) -> Callable[[], object]:
    async def run() -> None:
        places = Admission(1, size, None)

        async def one() -> None:
            async with places.acquire(1):
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(one()) for _ in range(size)]
        await asyncio.sleep(0)
        for task in reversed(tasks) if last_first else tasks:
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait(tasks)

    return lambda: run_async(run())


def many_calls(size: int) -> Callable[[], object]:
    calls = [{"id": f"call_{n}", "function": {"name": "f"}} for n in range(size)]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": ""} for n in range(size)]
    turns: list[Any] = [{"role": "assistant", "content": "", "tool_calls": calls}, *results[::-1]]
    return lambda: list(_one_call_a_turn(turns))


def built(kind: str, stream: bool, mark: str, size: int) -> Callable[[], object]:
    turn = {"role": "user", "content": "x"}
    parameters = {"type": "object"}
    function = {"name": "f", "parameters": parameters}
    fields: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "chat": (
            *(ChatCompletionRequest, ChatResponse),
            {"messages": [turn], "tools": [{"type": "function", "function": function}]},
        ),
        "responses": (
            *(ResponsesRequest, ResponsesResponse),
            {"input": "x", "tools": [{"type": "function", **function}]},
        ),
        "messages": (
            *(MessagesRequest, MessagesResponse),
            {
                "messages": [turn],
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": parameters}],
            },
        ),
    }
    read, builder, asked = fields[kind]
    formats = ChatFormats(TOOL_FORMATS["hermes"], REASONING_TAGS["think"])
    body = json.dumps({"model": "m", "stream": stream, **asked}).encode()
    made = builder(decode(body, read), ChatModel(tokenizer(), ChatTurns(tokenizer(), formats)))
    ending = Ending(finish_reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=9)
    text = mark * (size // len(mark))

    def run() -> None:
        made.add(0, TextChunk(text, 0, ending))
        made.last_events() if stream else made.whole()

    return run


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
# Each by what it feeds. A method named in ``_FED`` has to be in one of these names.
DRIVEN: dict[str, Callable[[int], Callable[[], object]]] = {
    "Answer.feed SequenceText.feed": partial(answer, False),
    "Answer.feed of a stream": partial(answer, True),
    "Answer.feed with tokens, feed_one": partial(answer, True, return_tokens=True),
    "StopMatcher.feed": partial(stops, ["a" * MAX_STOP_CHARS], "a"),
    "StopMatcher.feed with overlaps": partial(stops, ["ab" * 100 + "c", "ba" * 90 + "c"], "ab"),
    **{
        f"ReasoningState.feed {head}, {mark} by {piece}": partial(
            reasoning, header_end, head, mark, piece
        )
        for piece in (1, 10**9)
        for header_end, head, mark in (
            ("", "", " "),
            ("", "<think>", "<"),
            ("", "", "<think></think>"),
            ("<|message|>", "to=", "a"),
            ("<|message|>", "<|channel|>analysis", "<"),
            ("<|message|>", "", "<|end|>"),
            ("<|message|>", "", "<|start|>"),
            ("<|message|>", "<|message|>", "<|channel|>analysis<|message|>a<|end|>"),
        )
    },
    "StoppingCriteria.feed": criteria,
    "NgramIndex.extend": partial(drafts, 1),
    "NgramIndex.extend of many": partial(drafts, 7),
    "Http2Client.receive SETTINGS": partial(engine_frames, settings_frames),
    "Http2Client.receive UPDATE": partial(engine_frames, shut_windows),
    "Http2Client.receive GOAWAY": partial(engine_frames, goaways),
    "Http2Client.receive CONTINUATION": partial(engine_frames, continued),
    "ChunkWriter": writer,
    "ChatGuard.guard": partial(guarded, lambda size: "<s>" * size),
    "ChatGuard.guard ChatGuard.guard_parts": partial(guarded, lambda size: ["<", "s>"] * size),
    "check_guide": partial(guide, lambda size: '"' + '\\\\"' * size),
    "check_guide of marks": partial(guide, lambda size: '"\\' * size),
    "Admission, the first first": partial(waiters, False),
    "Admission, the last first": partial(waiters, True),
    "calls and their results": many_calls,
    **{
        f"{api} {mark[:3]} {'streamed' if stream else 'whole'}": partial(built, api, stream, mark)
        for api in ("chat", "responses", "messages")
        for stream in (False, True)
        for mark in ("a<tool_call>b", CALL, "<think>a</think>b", f"a{CALL}")
    },
}
# Methods of such names that no text reaches, or that others above call.
ELSEWHERE = {
    "JsonStrings.feed ChatParser.feed": "test_no_text_of_a_model_is_read_more_than_once",
    "Detokenizer.feed": "a protocol",
    "Detokenizer.feed_one": "a protocol",
    "ByteTableDetokenizer.feed_one ByteTableDetokenizer.feed": "Answer.feed",
    "WindowDetokenizer.feed_one WindowDetokenizer.feed": "windows",
    "EventParser.feed": "lines of JSON of a pipeline of ours",
    "SequenceEnds.feed": "hands on what comes",
    "NgramDrafts.propose": "a number of places that has a bound",
}
LARGE = {"chat", "responses", "messages", "check_guide", "ChatGuard.guard"}


@pytest.mark.parametrize("name", DRIVEN)
def test_what_is_fed_grows_with_its_size(name: str) -> None:
    """Each at two sizes; what it costs may grow by little more than the size."""
    size = 8 * SIZE if name.split(" ")[0] in LARGE else SIZE
    assert growth(DRIVEN[name], size) <= MOST


def test_everything_that_is_fed_is_driven() -> None:
    """A class with a method of these names stands in one of the tables."""
    known = " ".join(DRIVEN) + " ".join(ELSEWHERE)
    missing = [
        f"{owner.name}.{method.name}"
        for _, tree in modules()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name in _FED
        if f"{owner.name}.{method.name}" not in known
    ]
    assert not missing


# --- what has a bound -------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("over", [0, 1, 400])
def test_what_a_template_walks_has_a_depth(field: str, over: int) -> None:
    """One bound for all that a template may walk, also for arguments that are text."""
    value: Any = "x"
    for _ in range(MAX_DEPTH - 8 if over == 0 else MAX_DEPTH + over):
        value = [value]
    call = {"function": {"name": "f", "arguments": json.dumps({"a": value})}}
    turns: list[Any] = [{"role": "user", "content": "Hi"}]
    if field == "messages":
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
    options = ChatOptions(variables={"x": value} if field == "chat_template_kwargs" else {})
    tools = [{"function": {"name": "f", "parameters": {"a": value}}}] if field == "tools" else None
    if over == 0:
        assert tokenizer().render_chat(turns, options, tools)
    else:
        with pytest.raises(InvalidRequest, match=f"{field}: is nested more than {MAX_DEPTH}"):
            tokenizer().render_chat(turns, options, tools)


def test_an_engine_makes_no_series_without_end() -> None:
    """Its error texts may hold anything, and each would be a label."""
    metrics = RequestMetrics()
    for number in range(1000):
        reason = f"{number} " + "x" * 1000
        metrics.add(RequestStats(request_id="", outcome=Outcome.REFUSED, reason=reason))
    labels = [labels for metric, labels in metrics.numbers if metric.labels[1:] == ("reason",)]
    assert len(labels) < 120 and max(len(label) for pair in labels for label in pair) <= 64
    assert metrics.numbers[REQUESTS, ("refused", "other")] > 800


def test_a_message_of_the_engine_has_a_bound() -> None:
    """It is refused by its claim, before it comes."""
    client, _ = connected()
    stream = client.open(headers())
    claim = frame(DATA, 0, stream, b"\0\xff\xff\xff\xff")
    (error,) = client.receive(claim).ended.values()
    assert error is not None and error.status == "RESOURCE_EXHAUSTED"
    assert f"at most {MAX_MESSAGE_BYTES} are taken" in error.details


@pytest.mark.parametrize("name", ["config.pbtxt", "config.json"])
def test_files_nested_without_end_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(
        "a " + "{ a " * 5000 if name.endswith("pbtxt") else '{"a":' + "[" * 100_000
    )
    read: dict[str, Callable[[], object]] = {
        "config.pbtxt": lambda: read_config(tmp_path / name),
        "config.json": lambda: config_vocab_size(tmp_path),
    }
    with pytest.raises(SetupError, match=name):
        read[name]()
