"""The fields of requests, their types and ranges, for decoding and for ``/openapi.json``.

``null`` counts as absent. An unknown field is logged and ignored, since clients send what other
servers take. A known field that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from trtllm_bls.http.budgets import MAX_FIELDS, MAX_ITEMS, MAX_TEXT_TOKENS, MAX_TOOLS
from trtllm_bls.openai.api_errors import ApiError, invalid
from trtllm_bls.openai.content import note_once

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT32)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT32)]
Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
UnsupportedFields: TypeAlias = Mapping[str, tuple[Any, ...]]
Word: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, by one of these fields."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Generation(msgspec.Struct, kw_only=True, dict=True):
    """The fields of requests of all APIs, and the names of fields without support."""

    # Fields of the API, of other servers and of old clients that have no effect here.
    no_effect: ClassVar[tuple[str, ...]] = ()
    # Fields that would change the answer, with the values that change nothing and are allowed.
    unsupported: ClassVar[UnsupportedFields] = {}

    model: str = ""  # may be left out where one is served
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # Further fields, as OpenAI's older APIs and vLLM name them.
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=4096)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_MAX_INT64 - 1, le=_MAX_INT64)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_tokens: Natural | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Natural], msgspec.Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Word], msgspec.Meta(max_length=1024)] | None = None
    request_id: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    structured_outputs: StructuredOutputs | None = None
    # Members of ``structured_outputs`` by the names of older clients of vLLM, and SGLang's.
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    # Speculative decoding, as ``tensorrt_llm_bls`` names it.
    draft_source: str | None = None
    num_draft_tokens: Natural | None = None
    draft_memory: bool | None = None
    # Prompts share the engine's KV cache only with prompts of the same salt and API key.
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None

    @property
    def further(self) -> dict[str, Any]:
        """Fields of the body that the API does not have; a pipeline may read them."""
        values: dict[str, Any] = self.__dict__.get("further", {})
        return values


class Common(Generation, kw_only=True):
    """The fields of chats and completions."""

    no_effect = (
        *("service_tier", "store", "metadata", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "verbosity"),
        "spaces_between_special_tokens",
    )
    unsupported: ClassVar[UnsupportedFields] = {
        **dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
        "moderation": (),
        "suffix": (),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "priority": (0,),
        "use_beam_search": (False,),
        "truncate_prompt_tokens": (),
        "return_token_ids": (False,),
        "prompt_logprobs": (),
    }

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: Word | Annotated[list[Word], msgspec.Meta(max_length=4)] | None = None
    # Without effect, but checked.
    user: str | None = None
    add_special_tokens: bool | None = None

    @property
    def stop_words(self) -> tuple[str, ...]:
        """``stop`` as a list."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())


class Prediction(msgspec.Struct, kw_only=True):
    """A text that the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class Function(msgspec.Struct, kw_only=True):
    """A function that a tool calls. The chat template may read further members."""

    name: Word
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool, or the name of one."""

    function: Function
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools of the request that may be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The tool that has to be called, or the tools that may be."""

    type: str = "function"
    function: Function | None = None
    custom: Function | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | bool


class ChatMessage(msgspec.Struct, kw_only=True):
    """A turn. The chat template may read further members."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Tool] | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of a chat's answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The form of an answer of the other APIs."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None


class ChatCompletionRequest(Common, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_drafted: bool | None = None


class CompletionRequest(Common, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    max_tokens: Natural | None = None  # 0: the prompt alone
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, msgspec.Meta(ge=0, le=128)] | None = None


class TokenizeRequest(ChatCompletionRequest, kw_only=True):
    """``POST /tokenize``, as vLLM has it; ``messages`` are read where there is no ``prompt``."""

    model: str = ""  # empty: the server's first model
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_ITEMS)] = []
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``, as vLLM has it."""

    model: str = ""
    tokens: Annotated[list[Natural], msgspec.Meta(max_length=MAX_TEXT_TOKENS)]


# An escape of a whole character. The group matches the escape of half of one, which msgspec
# refuses.
_UNICODE_ESCAPES = re.compile(
    rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)|\\.", re.DOTALL
)
_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")
_MISTAKE_PATH = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_Value = TypeVar("_Value")
# Fields that decide what the answer is, by their names in all APIs and servers. Each row has the
# names of one meaning. A schema has some of a row at most. The other names are refused, and the
# error says which one to send.
_ANSWER_FIELDS = (
    ("max_completion_tokens", "max_output_tokens", "max_tokens", "max_new_tokens", "n_predict"),
    ("stop", "stop_sequences"),
    ("response_format", "text", "output_config", "format"),
    ("guided_grammar", "grammar"),
    ("guided_json", "json_schema", "guided_json_object"),
    ("guided_regex", "guided_whitespace_pattern"),
    ("structured_outputs", "structural_tag"),
    ("repetition_penalty", "repeat_penalty"),
    ("n",),
    ("allowed_token_ids",),
)
_DEFAULTS = {"n": 1, "response_format": {"type": "text"}}


def decode(body: bytes, kind: type[_Kind]) -> _Kind:
    """Read the request in ``body``. Raises ``ApiError``, with ``param`` where a field is wrong."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError) as error:
        # Clients cut texts within a character, and the text comes again with every later turn.
        repaired = _UNICODE_ESCAPES.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], body)
        if repaired != body:
            return decode(repaired, kind)
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    if len(fields) > MAX_FIELDS:
        problem = f"the body has {len(fields)} fields; at most {MAX_FIELDS} are allowed"
        raise ApiError(400, problem)
    further = {name: value for name, value in fields.items() if name not in kind.__struct_fields__}
    for name, value in further.items():
        _check_further(name, value, kind)
    request = checked("", fields, kind)
    if isinstance(request, Generation):
        request.__dict__["further"] = further
    return request


def _check_further(name: str, value: object, kind: type[msgspec.Struct]) -> None:
    """Note a field that ``kind`` does not have. Raises ``ApiError`` if it would change the answer.

    ``value`` is the field's value.
    """
    unsupported = getattr(kind, "unsupported", {})
    if name in unsupported:
        if value is not None and value not in unsupported[name]:
            raise invalid(name, "is not supported by this server", "unsupported_parameter")
        return
    synonyms = next((row for row in _ANSWER_FIELDS if name in row), ())
    if synonyms and value not in (None, _DEFAULTS.get(name)):
        problem = "is not supported here"
        for synonym in synonyms:
            if synonym in kind.__struct_fields__:
                problem += f"; send {synonym}"
                break
        raise invalid(name, problem, "unsupported_parameter")
    if name not in getattr(kind, "no_effect", ()):
        note_once(f"the field {name[:80]!r}, which is unknown and has no effect")


def json_text(value: object) -> str:
    """Return ``value`` as JSON."""
    return msgspec.json.encode(value).decode()


def checked(field: str, value: object, kind: type[_Value]) -> _Value:
    """Return the value of ``field``, or of the whole body, as ``kind``.

    Raises ``ApiError`` 400 on the part of it that is wrong.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = str(error)
        place = ""
        if mistake := _MISTAKE_PATH.match(problem):
            problem, place = mistake.groups()
        name = (field + place).removeprefix(".")
        if missing := _MISSING_FIELD.match(problem):
            raise invalid(f"{name}.{missing[1]}".removeprefix("."), "is missing") from None
        if not name:
            raise ApiError(400, str(error)) from None
        raise invalid(name, problem[:1].lower() + problem[1:]) from None
