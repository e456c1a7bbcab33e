"""A whole answer is the events of its stream, folded, in every API and however its text comes."""

from __future__ import annotations

import json
import os
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.openai_server import MODEL
from tests.helpers.scripted_text import tokenizer
from tests.text.test_chat_parsing import _PIECES
from trtllm_bls.openai.builder import ResponseBuilder
from trtllm_bls.openai.chat import ChatResponse
from trtllm_bls.openai.completions import CompletionResponse
from trtllm_bls.openai.conversation import ChatModel
from trtllm_bls.openai.messages import MessagesRequest, MessagesResponse
from trtllm_bls.openai.responses import ResponsesRequest, ResponsesResponse
from trtllm_bls.openai.schema import ChatCompletionRequest, CompletionRequest, decode
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.text.answer import Answer, TextRules
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.types import EngineChunk, FinishReason

CASES = int(os.environ.get("TRTLLM_BLS_CASES", "0"))
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "a": {}}}
NAMES = ("f", "weather")
APIS: dict[str, tuple[Any, Any]] = {
    "chat": (ChatCompletionRequest, ChatResponse),
    "completions": (CompletionRequest, CompletionResponse),
    "responses": (ResponsesRequest, ResponsesResponse),
    "messages": (MessagesRequest, MessagesResponse),
}


def asked(api: str, case: dict[str, Any], stream: bool) -> dict[str, Any]:
    turn = [{"role": "user", "content": "x"}]
    functions = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
    fields: dict[str, Any] = {"model": MODEL, "stream": stream}
    limit, stops = case["limit"], case["stops"]
    if api == "chat":
        fields |= {"messages": turn, "n": case["n"], "stop": stops, "max_tokens": limit}
        fields["tools"] = [{"type": "function", "function": each} for each in functions]
        fields |= {"logprobs": True, "top_logprobs": 0} if case["scored"] else {}
        fields |= {"stream_options": {"include_usage": True}} if stream else {}
    elif api == "completions":
        fields |= {"prompt": "x", "n": case["n"], "stop": stops, "max_tokens": limit}
        fields |= {"logprobs": 0} if case["scored"] else {}
        fields |= {"stream_options": {"include_usage": True}} if stream else {}
    elif api == "responses":
        fields |= {"input": "x", "max_output_tokens": limit}
        fields["tools"] = [{"type": "function", **each} for each in functions]
        fields |= {"include": ["message.output_text.logprobs"]} if case["scored"] else {}
    else:
        fields |= {"messages": turn, "max_tokens": limit, "stop_sequences": stops}
        fields["tools"] = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    return fields


def answered(api: str, case: dict[str, Any], stream: bool) -> bytes:
    """What is sent for this case, by the same path as in the server but for the engine."""
    read, builder = APIS[api]
    formats = ChatFormats(TOOL_FORMATS[case["tools"]], REASONING_TAGS[case["tags"]])
    body = json.dumps(asked(api, case, stream)).encode()
    made: ResponseBuilder = builder(
        decode(body, read), ChatModel(tokenizer(), ChatTurns(tokenizer(), formats))
    )
    (request,) = made.requests
    ids = tokenizer().encode(case["text"], add_special_tokens=False)
    made.count_prompt(1)
    rules = TextRules(prompt_tokens=1, max_tokens=case["limit"])
    many = request.num_return_sequences
    skip = request.skip_special_tokens is not False
    answer = Answer(request, rules, [tokenizer().detokenizer(skip) for _ in range(many)])
    sent = []
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in case["cuts"])})
    chunks = []
    for begin, end in pairwise(places):
        for index in range(many):
            part = ids[begin : max(begin, end - index)] if index else ids[begin:end]
            scores = (
                tuple(-float(n) for n, _ in enumerate(part)) if request.wants.log_probs else None
            )
            chunks.append(
                [EngineChunk(token_ids=tuple(part), sequence_index=index, log_probs=scores)]
            )
    for each in chunks if stream else [[*chain.from_iterable(chunks)]]:
        sent += [made.add(chunk.sequence_index, chunk) for chunk in answer.feed(each)]
    sent += [made.add(c.sequence_index, c) for c in answer.end(FinishReason.END_ID)]
    return b"".join([*sent, made.last_events()]) if stream else made.whole()


def known(value: Any) -> Any:
    """Without what is drawn at random, and without times."""
    if isinstance(value, dict):
        drawn = ("id", "call_id", "created", "created_at", "completed_at", "object")
        return {key: known(item) for key, item in value.items() if key not in drawn}
    return [known(item) for item in value] if isinstance(value, list) else value


def events_of(sent: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in sent.split(b"\n") if line.startswith(b"data: {")]


def grown(whole: dict[str, Any], more: dict[str, Any]) -> None:
    """Add a delta, as clients do: texts and lists grow, objects grow inside, the rest is set."""
    for key, value in more.items():
        if key == "tool_calls":
            calls = whole.setdefault(key, [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({})
                grown(calls[call["index"]], {k: v for k, v in call.items() if k != "index"})
        elif isinstance(value, dict) and isinstance(whole.get(key), dict):
            grown(whole[key], value)
        elif (isinstance(value, list) and isinstance(whole.get(key), list)) or (
            isinstance(value, str) and isinstance(whole.get(key), str) and key != "role"
        ):
            whole[key] += value
        elif value is not None or key not in whole:
            whole[key] = value


def fold_choices(events: list[Any], case: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    whole = {key: value for key, value in events[0].items() if key != "choices"}
    for event in events:
        whole["usage"] = event.get("usage") or whole.get("usage")
        for told in event["choices"]:
            grown(
                choices.setdefault(told["index"], {}),
                {k: v for k, v in told.items() if k != "index"},
            )
    whole["choices"] = [{"index": n, **choice} for n, choice in sorted(choices.items())]
    for choice in whole["choices"] if is_chat else ():
        message = choice["message"] = choice.pop("delta")
        message["refusal"] = None
        if not message["content"] and "tool_calls" in message:
            message["content"] = None
        if case["scored"]:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
    return whole


def fold_responses(events: list[Any]) -> dict[str, Any]:
    """The last event has the response; what came before must add up to it."""
    texts: dict[str, str] = {}
    scores: dict[str, list[Any]] = {}
    done = []
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
            scores.setdefault(event["item_id"], []).extend(event.get("logprobs", ()))
        elif event["type"] == "response.output_item.done":
            done.append(event["item"])
    whole: dict[str, Any] = events[-1]["response"]
    assert done == whole["output"]
    for item in done:
        shown = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert texts.get(item["id"], "") == shown
        if item["type"] == "message":
            (content,) = item["content"]
            late = content["logprobs"][len(scores[item["id"]]) :]
            assert scores[item["id"]] + late == content["logprobs"]
            joined = b"".join(bytes(each["bytes"]) for each in content["logprobs"]).decode(
                "utf-8", "replace"
            )
            assert not content["logprobs"] or content["text"].strip("\ufffd") in joined
    return whole


def fold_messages(events: list[Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            whole = event["message"]
            whole["content"] = []
        elif event["type"] == "content_block_start":
            whole["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = whole["content"][event["index"]], event["delta"]
            for key in ("text", "thinking", "signature"):
                block[key] = block.get(key, "") + delta[key] if key in delta else block.get(key)
            if "partial_json" in delta:
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            whole |= {k: v for k, v in event["delta"].items() if k != "container"}
            whole["usage"] |= event["usage"]
    for index, text in inputs.items():
        found = whole["content"][index]["input"] = json.loads(text, parse_constant=pytest.fail)
        assert isinstance(found, dict)
    whole["content"] = [{k: v for k, v in b.items() if v is not None} for b in whole["content"]]
    return whole


CASE = st.fixed_dictionaries(
    {
        "text": st.lists(
            _PIECES
            | st.sampled_from(["\t", "é🙂", "\\ud83d", "END", "[1]", "\x01", "NaN", "1e999"]),
            max_size=7,
        ).map("".join),
        "cuts": st.lists(st.integers(0, 500), max_size=12),
        "limit": st.sampled_from([1, 3, 9, 30, 5000]),
        "n": st.sampled_from([1, 1, 2]),
        "tools": st.sampled_from([*TOOL_FORMATS]),
        "tags": st.sampled_from([*REASONING_TAGS]),
        "scored": st.booleans(),
        "stops": st.sampled_from([[], ["END"], ["a", "</tool_call>"], ["\n\n"]]),
    }
)
_PLAIN = {"limit": 5000, "n": 1, "tools": "hermes", "tags": "think", "scored": True, "stops": []}
CALLS = '<think>Why?</think>A\n<tool_call>{"name": "f", "arguments": ["x"]}</tool_call>\nB'


@pytest.mark.parametrize("api", APIS)
@settings(max_examples=max(60, CASES // 4), deadline=None)
@given(case=CASE)
@example({**_PLAIN, "text": CALLS, "cuts": [*range(99)], "n": 2})
@example({**_PLAIN, "text": CALLS, "cuts": [], "limit": 20})
def test_a_whole_answer_is_its_stream_folded(api: str, case: dict[str, Any]) -> None:
    """Text, reasoning, calls, log-probabilities, counts, statuses and ends."""
    whole = json.loads(answered(api, case, stream=False))
    events = events_of(answered(api, case, stream=True))
    if api in ("chat", "completions"):
        folded = fold_choices(events, case, api == "chat")
    else:
        folded = fold_responses(events) if api == "responses" else fold_messages(events)
    assert known(folded) == known(whole)
