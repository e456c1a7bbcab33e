"""Whatever JSON stands in a field of a request: the client is told of a mistake of its own.

Each place of requests that use what the APIs have is given values of every other kind in turn, and
is left out. A 500 would be a defect: such a value got as far as code that did not expect it.
"""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

import pytest

from tests.helpers.json_places import MISSING, VALUES, changed, places
from tests.helpers.openai_server import MODEL
from tests.helpers.tiers import budget
from tests.openai.conftest import Connect
from trtllm_bls.openai import messages, responses

REFERRED = "msg_known"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "It", "parameters": SCHEMA, "strict": False}
CHAT_TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "custom", "custom": {"name": "run", "description": "Code"}},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
CHAT = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, IMAGE], "name": "ada"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
                },
                {"id": "2", "type": "custom", "custom": {"name": "run", "input": "1"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "tool", "tool_call_id": "2", "content": "2"},
    ],
    "tools": CHAT_TOOLS,
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": FUNCTION}]},
    },
    "stream_options": None,
    "stop": ["never"],
    "logit_bias": {"5": 1},
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "Hello"}]},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
}
FORMS = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}, "content": ""},
        {"role": "function", "name": "f", "content": "1"},
    ],
    "tools": CHAT_TOOLS[:1],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 1,
    "response_format": {"type": "text", "json_schema": {"name": "a", "schema": SCHEMA}},
}
RESPONSES_TOOLS = [
    {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False},
    {"type": "custom", "name": "run", "format": {"type": "text"}},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "inner"}]},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "web_search", "filters": {"allowed_domains": ["a"]}},
]
SHELL = {"type": "exec", "command": ["ls"], "env": {}}
RESPONSES = {
    "instructions": "Be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "developer", "content": "Now"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "sun"}],
        },
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "1"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "2"},
        {"type": "local_shell_call", "id": "l", "call_id": "3", "action": SHELL},
        {"type": "local_shell_call_output", "call_id": "3", "output": "a"},
        {"type": "shell_call", "call_id": "4", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "4", "output": [{"stdout": "a", "outcome": {}}]},
        {"type": "apply_patch_call", "call_id": "5", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "5", "status": "completed"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}]},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "found"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm", "annotations": []}],
        },
    ],
    "tools": RESPONSES_TOOLS,
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}, {"type": "local_shell"}],
    },
    "text": {"format": {"type": "text", "name": "a", "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "stream": True,
}
STORED = {
    "input": [
        {"type": "item_reference", "id": REFERRED},
        {"id": REFERRED},
        {"role": "user", "content": "Hi", "type": "message"},
    ],
    "store": True,
    "tool_choice": {"type": "function", "name": "inner", "namespace": "n"},
    "tools": RESPONSES_TOOLS[:3],
}
MESSAGES = {
    "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "Hi"},
            {"type": "document", "source": {"type": "text", "data": "a"}},
            {"type": "search_result", "source": "s", "title": "t", "content": [
                {"type": "text", "text": "a"}]},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": "s"},
            {"type": "redacted_thinking", "data": "s"},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Ulm"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "is_error": False, "content": [
                {"type": "text", "text": "sun"},
                {"type": "tool_reference", "tool_name": "weather"},
            ]},
        ]},
        {"role": "system", "content": [
            {"type": "tool_addition", "tool": {"name": "weather", "definition": {
                "name": "late", "input_schema": SCHEMA}}},
            {"type": "tool_addition", "tool": {"name": "weather"}},
            {"type": "tool_removal", "tool": {"name": "weather"}},
        ]},
    ],
    "tools": [
        {"name": "weather", "description": "It", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "stop_sequences": ["never"],
    "metadata": {"user_id": "a"},
    "max_tokens": 5,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
    "stream": True,
}  # fmt: skip
COMPLETIONS = {
    "prompt": ["one", "two"],
    "stop": ["never"],
    "logit_bias": {"5": 1},
    "stream_options": {"include_usage": True},
    "stream": True,
    "logprobs": 1,
    "structured_outputs": {"choice": ["a", "b"]},
    "nvext": {"a": [1]},
}
SHARES = budget(4, 1)  # each place is sent one of so many shares of the values
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", FORMS),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", STORED),
    ("/v1/responses/input_tokens", RESPONSES),
    ("/v1/responses/compact", RESPONSES),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/completions", COMPLETIONS),
    ("/tokenize", CHAT),
]


def test_the_requests_have_items_of_every_kind() -> None:
    given = json.dumps([RESPONSES, STORED, MESSAGES])
    kinds = {*messages._BLOCK_FIELDS, *responses._ITEM_FIELDS}
    kinds.discard("compaction")  # The server alone makes it.
    assert [kind for kind in kinds if f'"type": "{kind}"' not in given] == []


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_no_value_of_a_wrong_kind_is_a_defect_of_the_server(
    path: str, body: dict[str, Any], connect: Connect
) -> None:
    api, _ = connect()
    connection = http.client.HTTPConnection(api.host, api.port, timeout=60)

    def post(path: str, asked: dict[str, Any]) -> tuple[int, bytes]:
        text = json.dumps(asked).encode()
        connection.request("POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    body = {"model": MODEL, limit: 2, **body}
    statuses: dict[int, int] = {}
    wrong = []
    with closing(connection):
        if body.get("store"):  # what it refers to
            status, told = post(path, {"model": MODEL, "input": "Hi", "store": True})
            known = json.loads(told)["output"][0]["id"]
            body = json.loads(json.dumps(body).replace(REFERRED, known))
        status, told = post(path, body)
        assert status == 200, told  # as it stands it is right
        for number, place in enumerate(places(body)):
            for value in VALUES[number % SHARES :: SHARES]:
                status, told = post(path, changed(body, place, value))
                statuses[status] = statuses.get(status, 0) + 1
                if status >= 500 or b"INTERNAL" in told or b"unexpected" in told:
                    wrong.append((place, "missing" if value is MISSING else value, told[:300]))
    assert not wrong, f"{len(wrong)}, of which the first: {wrong[:5]}"
    assert min(statuses[200], statuses[400]) > 20, statuses
