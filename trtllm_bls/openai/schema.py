"""The fields of requests, their types and ranges, for decoding and for ``/openapi.json``.

``null`` counts as absent. An unknown field is logged and ignored, since clients send what other
servers take. A known field that would change the answer and is not supported is refused by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec

from trtllm_bls.errors import HALF_CHARACTER
from trtllm_bls.openai.errors import ApiError, invalid

log = logging.getLogger(__name__)

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_INT32)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_INT32)]
Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
RefusedFields: TypeAlias = Mapping[str, tuple[Any, ...]]
Word: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: nothing is padded


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form that the answer has; one of these."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Generation(msgspec.Struct, kw_only=True):
    """The fields of requests of all APIs. ``no_effect``, ``refused``: further known fields."""

    # Fields of the API, of other servers and of old clients that have no effect here.
    no_effect: ClassVar[tuple[str, ...]] = ()
    # Fields that would change the answer. The values listed ask for nothing, so they are allowed.
    refused: ClassVar[RefusedFields] = {}

    model: str
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # Beyond the APIs, as OpenAI's older ones and vLLM name them.
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], msgspec.Meta(max_length=4096)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    min_tokens: Natural | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Natural], msgspec.Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Word], msgspec.Meta(max_length=1024)] | None = None
    request_id: Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{1,128}$")] | None = None
    # Speculative decoding, as ``tensorrt_llm_bls`` names it.
    draft_source: str | None = None
    num_draft_tokens: Natural | None = None
    draft_memory: bool | None = None


class Common(Generation, kw_only=True):
    """The fields of chats and completions."""

    no_effect = (
        *("service_tier", "store", "metadata", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity", "spaces_between_special_tokens"),
    )
    refused: ClassVar[RefusedFields] = {
        **dict.fromkeys(("functions", "function_call", "audio", "web_search_options"), ()),
        "suffix": (),
        "modalities": (["text"],),
        "response_format": ({"type": "text"},),
        "priority": (0,),
        "use_beam_search": (False,),
        "truncate_prompt_tokens": (),
        "return_token_ids": (False,),
        "prompt_logprobs": (),
        **dict.fromkeys(("regex", "ebnf"), ()),
    }

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    stop: Word | Annotated[list[Word], msgspec.Meta(max_length=4)] | None = None
    # Without effect, but checked.
    user: str | None = None
    add_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # Its members under the names that older clients of vLLM send.
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def stop_words(self) -> tuple[str, ...]:
        """``stop`` as a list."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message, of reasoning, of a prediction, or of what a tool has returned."""

    type: Literal["text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.text is None and self.refusal is None:
            raise ValueError("must have a text")


def text_of(content: str | list[TextPart]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)


class Prediction(msgspec.Struct, kw_only=True):
    """What the answer is expected to resemble."""

    type: Literal["content"]
    content: str | list[TextPart]


class Function(msgspec.Struct, kw_only=True):
    """A function that a tool calls; what else it has is for the chat template."""

    name: Word
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool, or the name of one."""

    function: Function
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, of those that the request has."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], msgspec.Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True):
    """The tool that has to be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"] = "function"
    function: Function | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    schema: dict[str, Any] | bool


class ChatMessage(msgspec.Struct, kw_only=True):
    """One turn; what else it has is for the chat template."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Tool] | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of a chat's answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The form of an answer of the other APIs."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None


class ChatRequest(Common, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=8192)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=512)] | None = None
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


class TokenizeRequest(ChatRequest, kw_only=True):
    """``POST /tokenize``, as vLLM has it: of ``prompt``, or else of ``messages``."""

    model: str = ""  # the server's first
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=8192)] = []
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /detokenize``, as vLLM has it."""

    model: str = ""
    tokens: list[Natural]


_MOST_FIELDS, _MOST_CONTAINERS = 256, 100_000
_STRING = re.compile(b'"[^"]*"')
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{'))
# msgspec refuses half a character as it does JSON that was cut off.
_LONE_HALF = re.compile(
    rb"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]\w\w"
)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PATH = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)
_Value = TypeVar("_Value")
_seen: set[str] = set()  # unknown fields that the log has named


def decode(body: bytes, kind: type[_Kind]) -> _Kind:
    """The request in ``body``. Raises ``ApiError`` 400, with ``param`` where a field is wrong."""
    # Millions of empty lists would hold the GIL for half a second while they are made.
    containers = body.count(b"[") + body.count(b"{")
    if containers > _MOST_CONTAINERS:  # many may be in strings, as of a program's text
        unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
        outside = _STRING.sub(b"", unescaped.translate(None, _NO_STRUCTURE))
        containers = outside.count(b"[") + outside.count(b"{")
    if containers > _MOST_CONTAINERS:
        problem = f"the body has more than {_MOST_CONTAINERS} lists and objects"
        raise ApiError(400, problem)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        if half := _LONE_HALF.search(body):
            raise invalid("body", f"'{half[0].decode()}' {HALF_CHARACTER}") from None
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    if len(fields) > _MOST_FIELDS:
        problem = f"the body has {len(fields)} fields; at most {_MOST_FIELDS} are allowed"
        raise ApiError(400, problem)
    refused, no_effect = getattr(kind, "refused", {}), getattr(kind, "no_effect", ())
    for name in fields.keys() - set(kind.__struct_fields__):
        if name in refused:
            if fields[name] is not None and fields[name] not in refused[name]:
                raise invalid(name, "is not supported by this server", "unsupported_parameter")
        elif name not in no_effect and name not in _seen and len(_seen) < 100:
            _seen.add(name)
            log.info("requests bring the field %.80r, which is unknown and has no effect", name)
    return checked("", fields, kind)


def checked(field: str, value: object, kind: type[_Value]) -> _Value:
    """The value of ``field``, or of the whole body, as ``kind``.

    Raises ``ApiError`` 400 on the part of it that is wrong.
    """
    try:
        return msgspec.convert(value, kind)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        path = _PATH.match(str(error))
        problem, place = path.groups() if path else (str(error), "")
        name = (field + place).removeprefix(".")
        if missing := _MISSING.match(problem):
            raise invalid(f"{name}.{missing[1]}".removeprefix("."), "is missing") from None
        if not name:
            raise ApiError(400, str(error)) from None
        raise invalid(name, problem[:1].lower() + problem[1:]) from None
