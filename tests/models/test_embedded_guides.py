"""Guided decoding in the embedded engine: what is constrained parses and validates, always."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from openai.types import Batch, Completion, FileObject, Image, Model, Moderation, VectorStore

from tests.helpers.embedded_steps import answers, checkpoint
from tests.helpers.tiers import budget
from tests.helpers.tools import ping_and_set_tree
from tests.helpers.waiting import run_async
from trtllm_bls.engines import grammars
from trtllm_bls.engines.base import join_chunks
from trtllm_bls.engines.embedded import EmbeddedEngine, guides
from trtllm_bls.engines.embedded.guides import Guides
from trtllm_bls.engines.routing import RoutingEngine
from trtllm_bls.errors import InvalidRequest, Overloaded, Unsupported
from trtllm_bls.openai.chat import conversation_of
from trtllm_bls.openai.content import ContentReader
from trtllm_bls.openai.conversation import form_demand
from trtllm_bls.openai.schema import ChatCompletionRequest, CompletionRequest
from trtllm_bls.orchestrator.chat_turn import ChatFormats, ChatTurns
from trtllm_bls.settings.parameters import EngineParameters
from trtllm_bls.text.chat_formats import (
    FORCED,
    REASONING_TAGS,
    TOOL_FORMATS,
    ReasoningTags,
    forced_calls,
)
from trtllm_bls.text.chat_guides import calls_guide, form_guide
from trtllm_bls.text.chat_parser import Arguments, ChatParser, ToolCall
from trtllm_bls.text.tokenizer import Tokenizer, load_tokenizer
from trtllm_bls.types import (
    Draft,
    EngineRequest,
    FinishReason,
    Guide,
    Sampling,
    SpeculationRequest,
)

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "target"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# Each draws another text; the last asks for more than a short answer has.
SAMPLINGS = (
    Sampling(),
    Sampling(top_k=40, temperature=1.5, seed=3),
    Sampling(top_p=0.9, repetition_penalty=1.2, seed=8),
    Sampling(top_k=5, min_tokens=60, seed=1),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    sizes = {"max_batch": 8, "max_sequence_tokens": 512, "threads": 1}
    with EmbeddedEngine(EngineParameters(model_dir=DEMO, **sizes)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


def guided(kind: str | None, text: str | None = None, **more: Any) -> EngineRequest:
    guide = None if kind is None else Guide(kind, text)
    fields = {"request_id": "g", "input_ids": tuple(range(200, 216)), "max_tokens": 400}
    return EngineRequest(**fields | {"end_id": 2, "guide": guide} | more)


def texts(
    engine: EmbeddedEngine, tokenizer: Tokenizer, *requests: EngineRequest
) -> list[tuple[str, FinishReason | None]]:
    """Text and end of every sequence of requests that run side by side."""
    found = []
    for asked, chunks in zip(requests, answers(engine, *requests), strict=True):
        for index in range(asked.num_return_sequences):
            whole = join_chunks([chunk for chunk in chunks if chunk.sequence_index == index])
            detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
            text = detokenizer.feed(whole.token_ids) + detokenizer.flush()
            found.append((text, whole.finish_reason))
    return found


def soon_closed(tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """A bias for the brace that closes an object, without which this model never ends one."""
    return ((tokenizer.encode_word("}")[-1], 20.0),)


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}]),
    st.integers(-50, 50).flatmap(
        lambda low: st.integers(0, 50).map(
            lambda more: {"type": "integer", "minimum": low, "maximum": low + more}
        )
    ),
    st.integers(0, 12).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["^[a-f]{2,4}$", "^(ja|nein)$", "\\d{3}-\\d{2}"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
    st.lists(
        st.one_of(st.integers(1 - 2**53, 2**53 - 1), st.booleans(), _NAMES), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
)


def _objects(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(_NAMES, schemas, max_size=4)
    return properties.flatmap(
        lambda fields: st.sets(st.sampled_from(sorted(fields)) if fields else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": fields,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


def _arrays(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(schemas, st.integers(0, 2), st.integers(0, 2)).map(
        lambda drawn: {
            "type": "array",
            "items": drawn[0],
            "minItems": drawn[1],
            "maxItems": drawn[1] + drawn[2],
        }
    )


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=8,
)


@settings(max_examples=budget(5, 12), deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, end_id=st.sampled_from([2, -1]))
def test_every_answer_validates(
    engine: EmbeddedEngine,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    end_id: int,
) -> None:
    """Whatever the schema, sampling, minimum and end id: only ``max_tokens`` leaves half an
    answer, and the finish reason says so."""
    guide = json.dumps(schema)
    requests = [
        guided("json_schema", guide, sampling=sampling, end_id=end_id, max_tokens=120)
        for sampling in SAMPLINGS
    ]
    for text, reason in texts(engine, tokenizer, *requests):
        if reason is not FinishReason.LENGTH:
            assert reason is FinishReason.END_ID
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def written(guides: Guides, tokenizer: Tokenizer, schema: str, seed: int) -> str | None:
    """A text of random tokens that the guide allows, up to where it may end; or what never ends."""
    guide = run_async(guides.of(guided("json_schema", schema)))
    assert guide is not None
    draws, ids = np.random.default_rng(seed), list[int]()
    closing = [tokenizer.encode_word(mark)[-1] for mark in ('"', "}", "]")]
    while not guide.ended:
        row = draws.gumbel(size=tokenizer.model_vocab_size)
        row[closing] += 8  # else few texts end
        row[~guide.allowed] = -np.inf
        if row[2] > -np.inf:
            break
        if len(ids) == 400:
            return None
        ids.append(int(row.argmax()))
        guide.push(ids[-1])
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    return detokenizer.feed(tuple(ids)) + detokenizer.flush()


Allows = Callable[[str, str, str], bool]


@pytest.fixture(scope="module")
def allows(tokenizer: Tokenizer) -> Iterator[Allows]:
    """Tells if a text may be a whole answer: ``allows(kind, guide, text)``."""
    guides = Guides(DEMO, tokenizer.model_vocab_size)

    def allowed(kind: str, guide: str, text: str) -> bool:
        matcher = run_async(guides.of(guided(kind, guide)))
        assert matcher is not None
        for token in (*tokenizer.encode_word(text), 2):
            if not matcher.allowed[token]:
                return False
            if token != 2:
                matcher.push(token)
        return True

    yield allowed
    guides.close()


@pytest.mark.parametrize(
    ("kind", "guide", "text", "allowed"),
    [
        ("json_schema", '{"properties": {"a": {"type": "integer"}}}', '{"a": 1, "b": ""}', True),
        ("json_schema", '{"properties": {"a": {"type": "integer"}}}', r'{"\u0061": ""}', False),
        ("json_schema", '{"minProperties": 1}', '{"a": 1}', True),
        ("json_schema", '{"minProperties": 1}', "{}", False),
        ("json_schema", '{"minProperties": 2, "required": ["a", "b"]}', '{"a": 1, "b": 2}', True),
        ("regex", r"\d", "٣", False),
        ("regex", "a.b", "a\rb", False),
        ("regex", "(?s)a.b", "a\rb", True),
        ("regex", "[.]", ".", True),
    ],
)
def test_what_a_guide_allows(
    allows: Allows, kind: str, guide: str, text: str, allowed: bool
) -> None:
    """Neither more nor less than it says, in every dialect."""
    assert allows(kind, guide, text) is allowed


async def test_the_grammars_that_were_used_last_are_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one which is used all the time is compiled once."""
    monkeypatch.setattr("trtllm_bls.engines.embedded.guides._CACHED", 2)
    guides = Guides(DEMO, tokenizer.model_vocab_size)
    for text in ("a", "b", "a", "c"):
        assert await guides.of(guided("regex", text))
    guides.close()
    assert [text for _, text in guides._cache] == ["a", "c"]


def test_only_the_requests_end_tokens_end_a_text(tokenizer: Tokenizer) -> None:
    """The library takes another token of the vocabulary for one."""
    guides = Guides(DEMO, tokenizer.model_vocab_size)
    matcher = run_async(guides.of(guided("regex", "a+")))
    guides.close()
    assert matcher is not None
    (letter,) = tokenizer.encode_word("a")
    matcher.push(letter)
    allowed = set(np.flatnonzero(matcher.allowed).tolist())
    assert {2, letter} <= allowed
    assert all("a" in (tokenizer.token(token) or "") for token in allowed - {2})


@pytest.mark.parametrize("choice", ["café", "grün", '"\\"', "a\nb\x01\x7f", "\\x41", "🙂"])
def test_a_choice_is_answered_as_it_is_written(allows: Allows, choice: str) -> None:
    """Whatever its characters."""
    asked = CompletionRequest(model="", prompt="", guided_choice=["other", choice])
    form = form_demand(asked)
    assert form is not None
    guide = form.guide
    assert allows(guide.kind, guide.text or "", choice)
    assert not allows(guide.kind, guide.text or "", choice + "a")


# A call as each family writes it.
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "pythonic": "[f(a=1)]",
    "llama3_json": '{"name": "f", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}",
    "glm": "<tool_call>f</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma4": "<|tool_call>call:f{}<tool_call|>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|>',
    "cohere": '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {}}]',
    "phi4_mini": 'functools[{"name": "f", "arguments": {}}]',
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {}}</longcat_tool_call>',
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
    "lfm2": "<|tool_call_start|>[f()]<|tool_call_end|>",
    "olmo3": "<function_calls>\nf()\n</function_calls>",
}


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_an_answer_obeys_the_schema_or_is_a_call(
    allows: Allows, tokenizer: Tokenizer, family: str
) -> None:
    """Of tools that may be called, in the form of the model's own calls."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    request = msgspec.convert(
        {
            "model": "",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "response_format": form,
        },
        ChatCompletionRequest,
    )
    turns = ChatTurns(tokenizer, ChatFormats(TOOL_FORMATS[family]))
    turn = turns.turn(conversation_of(request, ContentReader()))
    guide = turn.guide
    assert guide is not None and turn.guide_field == "response_format"
    final = "<|channel|>final<|message|>Ada"  # a message that is neither
    told = [CALLS[family], '{"name": "Ada", "age": 7}', '{"name": "Ada"}', "Ada", "", final]
    allowed = [allows(guide.kind, guide.text or "", text) for text in told]
    assert allowed == [True, True, False, False, False, False]


FORMS = {
    Guide("json"): '{"a": 1}',
    Guide("json_schema", '{"type": "integer"}'): "12",
    Guide("regex", "a/b[0-9]"): "a/b7",
    Guide("ebnf_grammar", 'root ::= "a" b\nb ::= [0-9]+'): "a12",
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.kind))
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("end", ["</think>", "<|user|>"])
def test_a_form_comes_behind_reasoning(allows: Allows, form: Guide, opened: bool, end: str) -> None:
    """Of any length; a model that the prompt does not have reason may leave it out."""
    tags = ReasoningTags("<think>", end)
    guide = form_guide(form, tags, opened=opened)
    text = FORMS[form]
    thought = "" if opened else "<think>"
    thought += f"is it < or {text}?"
    texts = [f"{thought}{end}\n\n{text}", f"{thought}{end}{text}", text]
    texts += [f"{thought}{end}", f"{thought}{end}no", thought, "no"]
    allowed = [allows(guide.kind, guide.text or "", each) for each in texts]
    assert allowed == [True, True, not opened, False, False, False, False]


def test_harmony_reasons_before_its_answer_and_its_calls(
    allows: Allows, tokenizer: Tokenizer
) -> None:
    """In messages, each with its header."""
    # The small tokenizer ends its answers with harmony's own end of a message.
    tags = REASONING_TAGS["harmony"]._replace(end="<|user|>")
    own = TOOL_FORMATS["harmony"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    analysis = "<|channel|>analysis<|message|>Hm.<|user|><|start|>assistant"
    answer = '<|channel|>final<|message|>{"a": 1}'
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    form = form_guide(Guide("json"), tags, opened=False)
    demanded, calls = calls_guide(tools, "f", own, tags, parallel=True, opened=False)
    assert calls is own
    for guide, text, other in ((form, answer, call), (demanded, call, answer)):
        texts = [text, analysis + text, other, analysis + other, analysis]
        allowed = [allows(guide.kind, guide.text or "", each) for each in texts]
        assert allowed == [True, True, False, False, False]


@pytest.mark.parametrize("marker", ["<|user|>", "<|use"])
def test_a_call_may_begin_with_a_control_token(allows: Allows, marker: str) -> None:
    """Some families' markers are one; others spell theirs."""
    parts = [{"type": "const_string", "value": marker}, {"type": "any_text"}]
    guide = json.dumps({"format": {"type": "sequence", "elements": parts}})
    assert allows("structural_tag", guide, marker + " and <|system|> more")
    assert not allows("structural_tag", guide, "<|system|>")


@pytest.mark.parametrize("forced", [False, True])
def test_published_schemas_are_kept(tokenizer: Tokenizer, forced: bool) -> None:
    """Somebody else's types: as the form of an answer, and as the parameters of a tool."""
    guides, ended = Guides(DEMO, tokenizer.model_vocab_size), 0
    for kind in (Batch, Completion, FileObject, Image, Model, Moderation, VectorStore):
        schema = kind.model_json_schema()
        if forced:
            tool = {"type": "function", "function": {"name": "save", "parameters": schema}}
            schema = json.loads(forced_calls([tool], "save"))
        for seed in range(2):
            text = written(guides, tokenizer, json.dumps(schema), seed)
            if text is not None:
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
                ended += 1
    guides.close()
    assert ended >= 10


@pytest.mark.parametrize(
    ("kind", "guide", "pattern"),
    [
        ("regex", "(red|green) [0-9]{3}", "(red|green) [0-9]{3}"),
        ("regex", "[ä-ü]{4}", "[ä-ü]{4}"),
        ("regex", "", ""),
        ("regex", r"\d{6}|[\d]{6}", "[0-9]{6}"),
        ("regex", r"a.{6}", r"a[^\n\r\u2028\u2029]{6}"),
        ("regex", r"(?s)a[.].", r"a\.[\s\S]"),
        ("ebnf_grammar", 'root ::= "<" [a-c]+ ">" | "none"', "<[a-c]+>|none"),
    ],
)
def test_other_guides_are_kept(
    engine: EmbeddedEngine, tokenizer: Tokenizer, kind: str, guide: str, pattern: str
) -> None:
    """Regular expressions and grammars, also one that only the empty text follows."""
    asked = [guided(kind, guide, sampling=sampling) for sampling in SAMPLINGS[:2]]
    told = texts(engine, tokenizer, *asked)
    ended = [text for text, reason in told if reason is FinishReason.END_ID]
    assert ended and all(re.fullmatch(pattern, text) for text in ended)


def test_json_is_an_object(engine: EmbeddedEngine, tokenizer: Tokenizer) -> None:
    """The type without a guide of its own."""
    bias = soon_closed(tokenizer)
    ((text, reason),) = texts(engine, tokenizer, guided("json", embedding_bias=bias))
    assert reason is FinishReason.END_ID
    assert isinstance(json.loads(text), dict)


def test_a_schema_cannot_loosen_what_is_enforced(
    engine: EmbeddedEngine, tokenizer: Tokenizer
) -> None:
    """The library's own options inside a schema are not the caller's to set."""
    loose = {"type": "object", "not": {"required": ["a"]}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest, match="guided_decoding_guide: cannot be enforced"):
        answers(engine, guided("json_schema", json.dumps(loose)))


def test_drafts_that_the_guide_forbids_are_rejected(
    engine: EmbeddedEngine, tokenizer: Tokenizer
) -> None:
    """Verification masks each position; a draft that follows the guide is accepted whole."""
    whole = join_chunks(*answers(engine, guided("json_schema", json.dumps(PERSON))))
    for draft, accepted in ((whole.token_ids[:6], 6), ((*whole.token_ids[:3], 300, 301), 3)):
        asked = guided("json_schema", json.dumps(PERSON), draft=Draft(token_ids=draft))
        chunk = join_chunks(*answers(engine, asked))
        assert chunk.token_ids == whole.token_ids[: accepted + 1]


@pytest.mark.parametrize(
    ("kind", "guide", "field", "problem"),
    [
        ("json_schema", "{", "guided_decoding_guide", "is no json_schema"),
        ("json_schema", "[]", "guided_decoding_guide", "object or a boolean"),
        ("json_schema", "false", "guided_decoding_guide", "cannot be enforced"),
        ("json_schema", "[" * 100_000, "guided_decoding_guide", "nested too deeply"),
        ("json_schema", '{"not": {}}', "guided_decoding_guide", "not"),
        ("json_schema", f'{{"enum": [{-(2**63)}]}}', "guided_decoding_guide", f"{-(2**63)} in it"),
        ("json_schema", f'{{"const": {2**53}}}', "guided_decoding_guide", f"{2**53} in it"),
        ("json_schema", '{"maximum": 1e308}', "guided_decoding_guide", "1e308 in it is beyond"),
        ("json_schema", '{"maximum": Infinity}', "guided_decoding_guide", "Infinity in it"),
        ("json_schema", "9" * 5000, "guided_decoding_guide", "is no json_schema"),
        ("json_schema", '{"minProperties": 2}', "guided_decoding_guide", "minProperties is beyond"),
        ("regex", "(", "guided_decoding_guide", "cannot be enforced"),
        ("regex", "[[:alpha:]]", "guided_decoding_guide", r"is no regex: \[ inside \[\]"),
        ("regex", "[a&&b]", "guided_decoding_guide", r"&& inside \[\]"),
        ("ebnf_grammar", "root", "guided_decoding_guide", "is no ebnf_grammar"),
        ("structural_tag", "[]", "guided_decoding_guide", "is an object"),
        (
            "structural_tag",
            '{"format": {"type": "x"}}',
            "guided_decoding_guide",
            "only or, sequence",
        ),
        ("ebnf_grammar", 'start: %json {"enum": [1]}', "guided_decoding_guide", "%json is not"),
        ("xml", "a", "guided_decoding_guide_type", "'xml' is unknown"),
        ("regex", None, "guided_decoding_guide", "is missing"),
    ],
)
def test_a_bad_guide_is_refused_by_name(
    engine: EmbeddedEngine, kind: str | None, guide: str | None, field: str, problem: str
) -> None:
    """One line names the field; the next request works."""
    with pytest.raises(InvalidRequest, match=f"^{field}: .*{problem}") as caught:
        answers(engine, guided(kind, guide))
    assert "\n" not in str(caught.value)


def chain_of_references(length: int) -> str:
    links = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    links[f"d{length}"] = {"type": "string"}  # type: ignore[dict-item]
    return json.dumps({"$defs": links, "$ref": "#/$defs/d0"})


def chain_of_rules(length: int) -> str:
    rules = [f"r{n} ::= r{n + 1}" for n in range(length)]
    return "\n".join(["root ::= r0", *rules, f'r{length} ::= "a"'])


def long_rules(count: int) -> str:
    rules = [f'r{n} ::= "a" r{n + 1}' for n in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "a"'])


@pytest.mark.parametrize(
    ("kind", "guide", "problem"),
    [
        ("json_schema", chain_of_references(3000), "chained too deeply"),
        ("ebnf_grammar", chain_of_rules(4000), "chained too deeply"),
        pytest.param(
            *("ebnf_grammar", long_rules(20_000), "takes more than 1 s"), marks=pytest.mark.slow
        ),
        ("json_schema", '{"$ref": "#"}', "cannot be enforced"),
        ("regex", "(a{1000}){1000}", "cannot be enforced"),
    ],
    ids=["references", "rules", "many rules", "itself", "repetitions"],
)
def test_a_hostile_grammar_harms_only_its_sender(
    hostile_engine: EmbeddedEngine, kind: str, guide: str, problem: str
) -> None:
    """The compiler may overflow its stack or run for minutes: it does so in another process. The
    sender is told by name, and the engine answers on."""
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequest, match=f"^guided_decoding_guide: .*{problem}"):
            answers(hostile_engine, guided(kind, guide))
    answers(hostile_engine, guided("json_schema", '{"type": "string"}', max_tokens=4))


def test_a_compilation_that_does_not_end_is_no_fault_of_its_guide(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process stands still: the process ends, the sender is told to try again, and can."""
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\nexec sleep 1000\n")
    idle.chmod(0o755)
    unseen = guided("json_schema", '{"const": "a guide that no other test has"}')
    children = psutil.Process().children()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(idle))
        patch.setattr(grammars, "_START_SECONDS", 0.1)
        patch.setattr(grammars, "_CLOCK_FACTOR", 0.2)
        with pytest.raises(Overloaded, match=r"did not end in 0.5 s; .*; try again in about 1 s$"):
            answers(engine, unseen)
    assert psutil.Process().children() == children
    [[chunk, *_]] = answers(engine, unseen)
    assert chunk.token_ids


@pytest.fixture(scope="module")
def hostile_engine() -> Iterator[EmbeddedEngine]:
    sizes = {"max_batch": 2, "threads": 1, "guide_compile_seconds": 1.0}
    with EmbeddedEngine(EngineParameters(model_dir=DEMO, **sizes)) as engine:
        yield engine


def test_a_checkpoint_without_a_tokenizer_cannot_be_guided() -> None:
    """It is refused by name, before anything is computed."""
    with (
        EmbeddedEngine(EngineParameters(model_dir=checkpoint(), max_batch=1, threads=1)) as bare,
        pytest.raises(Unsupported, match=r"guided_decoding_guide_type: .*tokenizer\.json"),
    ):
        answers(bare, guided("json", end_id=-1, input_ids=(3, 4)))


async def test_speculation_steps_aside_unless_it_was_asked_for(engine: EmbeddedEngine) -> None:
    """A deployment that speculates by default decodes a guided request plainly."""
    routing = RoutingEngine(engine, by_default=True)
    async with aclosing(routing.generate(guided("json_schema", json.dumps(PERSON)))) as stream:
        chunk = join_chunks([chunk async for chunk in stream])
    assert chunk.finish_reason is FinishReason.END_ID and chunk.speculation is None
    with pytest.raises(Unsupported, match="guided_decoding_guide"):
        routing.generate(guided("json", speculation=SpeculationRequest(num_draft_tokens=3)))


TOOLS = ping_and_set_tree()


@pytest.mark.parametrize("name", [None, "set_tree"])
def test_a_demanded_call_is_made(
    engine: EmbeddedEngine, tokenizer: Tokenizer, name: str | None
) -> None:
    """The model has no choice: a tool that exists, with arguments that its schema allows."""
    guide = forced_calls(TOOLS, name, parallel=False)
    sampling, bias = Sampling(top_k=30, seed=4), soon_closed(tokenizer)
    asked = guided("json_schema", guide, sampling=sampling, embedding_bias=bias)
    for text, reason in texts(engine, tokenizer, replace(asked, num_return_sequences=2)):
        assert reason is FinishReason.END_ID
        jsonschema.validate(json.loads(text), json.loads(guide))
        parser = ChatParser(FORCED)
        events = [*parser.feed(text), *parser.flush()]
        assert isinstance(events[0], ToolCall) and events[0].name in ("set_tree", name or "ping")
        arguments = "".join(e.text for e in events if isinstance(e, Arguments))
        assert json.loads(arguments) == json.loads(text)[0]["arguments"]


def test_an_llguidance_that_is_too_old_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM 1.2 pins 0.7.29, beside which all else works."""
    monkeypatch.setattr(guides, "version", {"llguidance": "0.7.29"}.get)
    old = Guides(DEMO, tokenizer.vocab_size)
    with pytest.raises(Unsupported, match=r"needs llguidance 1\.6; 0\.7\.29 is here"):
        run_async(old.of(guided("json_schema", "{}")))
    old.close()
