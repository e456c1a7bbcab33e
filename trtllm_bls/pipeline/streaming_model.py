"""A Triton model that a user writes as one async function (docs/pipelines.md).

Users import its public names from ``trtllm_bls.pipeline``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import weakref
from abc import ABC
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias, TypeVar

from trtllm_bls.errors import (
    CallChainTooLong,
    CycleWithoutPlace,
    DeadlineExceeded,
    Defect,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    InvalidRequest,
    SettingsError,
    TrtllmBlsError,
)
from trtllm_bls.orchestrator.deployment import BaseDeployment, defaults_of
from trtllm_bls.orchestrator.orchestrator import (
    Load,
    Orchestrator,
    RequestTimes,
    has_expired,
    stats_of,
    timeout,
)
from trtllm_bls.pipeline.content_parts import ContentPart, with_parts
from trtllm_bls.pipeline.faces import (
    FaceFields,
    Faces,
    Speech,
    face_end,
    face_tensors,
    requested_face,
)
from trtllm_bls.pipeline.language_model import (
    CURRENT_REQUEST,
    LLM,
    ConversationOptions,
    Step,
    Steps,
)
from trtllm_bls.pipeline.other_models import CallOptions, Origin, OtherModels, OtherStream
from trtllm_bls.pipeline.sessions import Session, SessionStore
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.faces import PART_INPUTS, Face
from trtllm_bls.settings.model_config import CHAT_EVENTS, CHAT_REQUEST, written_parameters
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import (
    COMMON_KEYS,
    DIRECTORY,
    FLAG,
    REASONING_PARSER,
    SESSION_DIR,
    TEXT,
    TOOL_PARSER,
    BlsParameters,
    EngineChoice,
    EngineKind,
    Kind,
    Parameter,
    Parameters,
    choice,
    nearest,
    parameters_in,
    parse_engine,
    suggestion,
)
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.chat_parser import check_event
from trtllm_bls.text.checkpoint_dir import one_line
from trtllm_bls.text.json_values import json_value
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.request_server import Call
from trtllm_bls.triton.served_model import ServedModel
from trtllm_bls.types import Array, Backoff
from trtllm_bls.wire.call_context import CONTEXT_PARAMETER, MAX_CALL_DEPTH, CallContext
from trtllm_bls.wire.contract import Tensor, by_name
from trtllm_bls.wire.traceparent import valid_traceparent

if sys.version_info >= (3, 11):
    from typing import ParamSpec, Unpack
else:
    from typing_extensions import ParamSpec, Unpack

__all__ = ["EngineError", "InvalidRequest", "Step", "Tensor"]  # for ``trtllm_bls.pipeline``

# All that a pipeline's author declares or writes. Other names of ``StreamingModel`` are its own.
_AUTHORS_NAMES = frozenset(
    (
        *("inputs", "outputs", "parameters", "options", "accepts", "dimensions", "speech"),
        *("load", "warm_up", "unload", "answer", "chat", "embed", "speak", "rerank"),
    )
)
# What an author writes in place of a method of Triton's.
_OUR_WAYS = {
    "initialize": "write `async def load(self, deployment)`",
    "execute": "write `async def answer(self, request, response)`",
    "finalize": "write `async def unload(self)`",
}
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
Value: TypeAlias = bool | int | float | str
_WARM_UP_BACKOFF = Backoff(1.0, 60.0)
_WARM_UP_LOG_SECONDS = 10  # between two log lines about a warm-up that still runs
_PARAMETER_KINDS = {
    bool: FLAG,
    int: Kind("a whole number", int),
    float: Kind("a number", float),
    str: TEXT,
}
# The types of a pipeline's own options, and their names in an error.
_JSON_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
AHEAD_S = 2.0  # playing time that ``Response.send`` sends in advance

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PipelineParameters(BlsParameters):
    """The parameters of a pipeline, which may do without a language model."""

    tokenizer_dir: Path | None = DIRECTORY.parameter(  # type: ignore[assignment]
        "Directory of the language model's tokenizer; empty = there is no language model.",
        env=parameters_in(BlsParameters)["tokenizer_dir"].env,
    )
    tool_parser: str = choice("auto", "none", *TOOL_FORMATS).parameter(
        "How the language model writes tool calls; auto: by its chat template, none: as text.",
        env=TOOL_PARSER,
    )
    reasoning_parser: str = choice("auto", "none", *REASONING_TAGS).parameter(
        "How the language model marks reasoning; auto: by its chat template, none: not at all.",
        env=REASONING_PARSER,
    )
    session_dir: str = TEXT.parameter(
        "Directory of what the model's instances remember of conversations (`request.session`); "
        "empty = each process remembers by itself.",
        env=SESSION_DIR,
    )


@asynccontextmanager
async def connect(
    engine: str, *, tokenizer: str | os.PathLike[str], **parameters: object
) -> AsyncIterator[LLM]:
    """Connect any asyncio program to the language model at ``engine``.

    ``engine``: ``trtllm://HOST:PORT`` or ``triton+grpc://HOST:PORT/MODEL``. ``tokenizer``: the
    directory of its tokenizer. ``parameters``: parameters of ``tensorrt_llm_bls``
    (docs/parameters.md), such as ``request_timeout_seconds``. Raises ``SetupError``.
    """
    values = {"engine": engine, "tokenizer_dir": os.path.abspath(tokenizer)} | parameters
    config = {"name": BLS_NAME, "parameters": written_parameters(values)}
    arguments = {
        "model_config": json.dumps(config),
        "model_repository": str(Path.cwd() / BLS_NAME),
    }
    deployment = PipelineDeployment(Parameters(arguments, {}).read(PipelineParameters))
    try:
        yield await asyncio.to_thread(deployment.llm)
    finally:
        await deployment.close()


# --- a model of your own ----------------------------------------------------------------------


class PipelineDeployment(BaseDeployment):
    """The language models, other models and parameters of a loaded pipeline.

    ``parameters``: the model's own (``StreamingModel.parameters``), as ``config.pbtxt`` sets them.
    """

    def __init__(
        self,
        parameters: PipelineParameters,
        pb_utils: Any = None,
        model_name: str = "pipeline",
    ) -> None:
        super().__init__(parameters, pb_utils, model_name)
        self.parameters: Mapping[str, Any] = {}
        self.warm_up_problem = ""  # why the model is not ready yet
        self.unfinished: set[Response] = set()
        directory: Path | None = None
        if parameters.session_dir:
            directory = Path(parameters.session_dir)
        self.sessions = SessionStore(directory)
        self.other_models = OtherModels(parameters.engine_url, engine_tls(parameters))
        self._llms: dict[tuple[str, ...], LLM] = {}
        self._orchestrators: list[Orchestrator] = []

    async def engine_problems(self) -> dict[str, str]:
        """Return the engines' problems, or only the one of a ``warm_up`` that has not succeeded."""
        if self.warm_up_problem:
            return {self.name: self.warm_up_problem}
        return await super().engine_problems()

    def llm(
        self,
        name: str = "",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> LLM:
        """Return the language model that the parameters name, or another one.

        ``name``: a model of this server, or an address in the form of the parameter ``engine``.
        ``tokenizer``: the directory of its tokenizer, by default ``tokenizer_dir``.
        ``tool_parser`` and ``reasoning_parser``: the formats of its calls and reasoning. The
        default is the parameter of that name, or, with another tokenizer, its chat template. The
        first call takes seconds. Raises ``SetupError``.
        """
        parameters = self.chat_parameters(tokenizer, tool_parser, reasoning_parser)
        if parameters.tokenizer_dir is None:
            raise SettingsError(f"model {self.name}: parameter tokenizer_dir: is missing")
        if name:
            choice = EngineChoice(EngineKind.TRITON, (("", name),))
            if ":" in name:
                choice = parse_engine(name)
            parameters = replace(
                parameters, engine=choice, tensorrt_llm_draft_model_name="", draft_source="off"
            )
        parsers = (parameters.tool_parser, parameters.reasoning_parser)
        key = (name, str(parameters.tokenizer_dir), *parsers)
        if key not in self._llms:
            self._llms[key] = self._new_llm(parameters)
        return self._llms[key]

    def chat_parameters(
        self,
        tokenizer: str | os.PathLike[str] | None,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> PipelineParameters:
        """Return the parameters of a language model with these arguments of ``llm``.

        Raises ``SettingsError``.
        """
        parameters: PipelineParameters = self._parameters
        if tokenizer is not None:
            directory = Path(tokenizer)
            if directory != parameters.tokenizer_dir:
                # The model may be of another family, so the parameters do not tell its formats.
                tool_parser = tool_parser or "auto"
                reasoning_parser = reasoning_parser or "auto"
            parameters = replace(parameters, tokenizer_dir=directory)
        parsers = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        declarations = parameters_in(PipelineParameters)
        for key, parser in parsers.items():
            if parser is not None:
                value = declarations[key].parse(self.name, key, parser)
                parameters = replace(parameters, **{key: value})
        return parameters

    def _new_llm(self, parameters: PipelineParameters) -> LLM:
        assert parameters.tokenizer_dir is not None
        tokenizer = load_tokenizer(parameters.tokenizer_dir, own_process=False)
        engine = self.open(parameters, tokenizer)
        # Admission and reports are those of the pipeline's request. Its calls of the language model
        # have neither.
        orchestrator = Orchestrator(tokenizer, engine, defaults_of(parameters))
        self._orchestrators.append(orchestrator)
        return LLM(orchestrator, tokenizer, parameters.tool_parser, parameters.reasoning_parser)

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> dict[str, Array]:
        """Call ``Request.infer`` of this task's request. In ``warm_up`` there is no request."""
        request = CURRENT_REQUEST.get()
        if isinstance(request, Request):
            return await request.infer(model, inputs, outputs, **options)
        return await self.other_models.infer(model, inputs, outputs, Origin(self.name), **options)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> OtherStream:
        """Call ``Request.stream`` of this task's request. In ``warm_up`` there is no request."""
        request = CURRENT_REQUEST.get()
        if isinstance(request, Request):
            return request.stream(model, inputs, outputs, **options)
        return self.other_models.stream(model, inputs, outputs, Origin(self.name), **options)

    def load(self) -> Load:
        """Count the pipeline's requests. A request without a response is a waiting one."""
        running = 0
        waiting = 0
        for response in self.unfinished.copy():
            if response.responses:
                running += 1
            else:
                waiting += 1
        tokens = sum(orchestrator.load().tokens for orchestrator in self._orchestrators)
        return Load(running, waiting, self.admission.queued, tokens)

    @property
    def handed_over(self) -> bool:
        """True if no request runs. A pipeline's request may call models until its end."""
        return not self.unfinished

    async def close(self) -> None:
        await self.other_models.close()
        await super().close()
        await asyncio.to_thread(self.sessions.close)


class Request:
    """A request: its inputs by name (``request["wav"]``), as Triton gives them.

    ``id``: unique in the process. ``client_id``: the id that the caller chose. ``parameters``: the
    request's parameters as the caller sent them. ``traceparent``: the caller's trace context (W3C).
    ``key``: a digest of the client's API key, if there are keys. ``cache_salt``: tells apart the
    callers that may share blocks of the KV cache. ``callers``: the pipelines that wait for this
    request, beginning with the one that the client called. ``session``: the value that the model
    keeps for the conversation; None: the request is part of no conversation. All calls of models
    that the request makes pass these on. ``tokens`` and ``prompt_tokens``: the sums over the
    language model's answers so far. ``finish_reason``: that of the last answer.
    """

    pipeline_options: Collection[str] = ()  # the pipeline's own in ``ChatRequest.options``

    def __init__(
        self,
        call: Call,
        deployment: PipelineDeployment,
        inputs: Collection[str] = (),
        rows: bool = False,
    ) -> None:
        self._arrays = call.arrays
        self._other_models = deployment.other_models
        self._input_names = inputs
        if rows:
            self._arrays = {name: array[0] for name, array in call.arrays.items()}
        self._texts: dict[str, str] = {}  # the texts that ``text`` returned, by input name
        self.id = call.id
        self.client_id = call.client_id
        self.parameters: dict[str, Any] = json.loads(call.parameters)
        self.parameters.pop(CONTEXT_PARAMETER, None)
        self.traceparent: str | None = None
        traceparent = self.parameters.get("traceparent")
        if isinstance(traceparent, str):
            self.traceparent = valid_traceparent(traceparent)
        self.key = call.context.key
        self.cache_salt = call.context.cache_salt
        self.callers = call.context.models
        self.session: Session | None = None
        session_id = call.context.session
        if session_id is None and call.sequence_id:
            session_id = f"sequence {call.sequence_id}"
        if session_id is not None:
            self.session = Session(deployment.sessions, deployment.name, self.key, session_id)
        self._model = deployment.name
        self.deadline: float | None = None  # by the event loop's clock
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish_reason = "stop"
        # The streams that ``close`` ends. One that nobody refers to any more ends itself.
        self.streams: weakref.WeakSet[Steps | OtherStream] = weakref.WeakSet()
        # The running calls of ``infer``, and the model of each.
        self._calls: dict[asyncio.Future[dict[str, Array]], str] = {}
        # The tasks that called a model on the request's behalf.
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._has_ended = False

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            problem = "is missing"
            if name not in self._input_names:
                problem = f"is missing; {nearest(name, self._input_names)}".rstrip("; ")
            raise InvalidRequest(name, problem)
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def text(self, name: str) -> str:
        """Return the one text of an input of type STRING. Raises ``InvalidRequest``."""
        values = self[name].reshape(-1).tolist()
        if len(values) != 1:
            raise InvalidRequest(name, f"{len(values)} texts; send one")
        (value,) = values
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                raise InvalidRequest(name, f"is not UTF-8: {error.reason}") from error
        self._texts[name] = str(value)
        return self._texts[name]

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> dict[str, Array]:
        """Return the response of another model of this server. ``outputs``: empty for all.

        Values become exactly the types and shapes that the model declares. The call is cancelled
        with the request. Raises ``TrtllmBlsError`` for a value that does not fit, ``EngineError``
        for an error of the model, ``EngineUnavailable`` while the server cannot be reached.
        """
        self._check_running(f"a call of {model}")
        answer = self._other_models.infer(model, inputs, outputs, self._origin(), **options)
        call = asyncio.ensure_future(answer)
        self._calls[call] = model
        try:
            return await call
        finally:
            del self._calls[call]

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> OtherStream:
        """Return the responses of a decoupled model of this server; otherwise like ``infer``.

        ``aclose``, dropping the stream and the end of the request end the model's work.
        """
        origin = self._origin()
        stream = self._other_models.stream(model, inputs, outputs, origin, self.ended, **options)
        self.begins(stream)
        return stream

    @property
    def called(self) -> set[str]:
        """The other models that run for this request now."""
        models = {*self._calls.values()}
        for stream in self.streams:
            if isinstance(stream, OtherStream):
                models.add(stream.model)
        return models

    def _origin(self) -> Origin:
        return Origin(self.id, self.traceparent, self._context)

    def _context(self) -> CallContext:
        """Return the context that a call of a model passes on, with the time left now."""
        seconds = None
        if self.deadline is not None:
            seconds = max(0.0, self.deadline - asyncio.get_running_loop().time())
        session_id = None
        if self.session is not None:
            session_id = self.session.id
        return CallContext(
            key=self.key,
            cache_salt=self.cache_salt,
            session=session_id,
            seconds=seconds,
            models=(*self.callers, self._model),
        )

    def sent(self, options: Mapping[str, Any], tools: Any) -> set[str]:
        """Return the names of values that are the caller's own, and ``messages`` of a chat."""
        return set()

    def input_with(self, text: str) -> str | None:
        """Return the name of the input that has this text."""
        for name, value in self._texts.items():
            if value == text:
                return name
        return None

    def begins(self, call: Steps | OtherStream) -> None:
        """Add a call, which ends with the request. Raises if the request has ended."""
        self._check_running("an answer")
        self.streams.add(call)

    def ended(self, call: Steps | OtherStream) -> None:
        """Remove a call that has ended."""
        self.streams.discard(call)

    def _check_running(self, call: str) -> None:
        """Note the task that makes a call. Raises ``TrtllmBlsError`` if the request has ended."""
        if self._has_ended:
            problem = f"{call} was asked for after the request had ended; await it in answer"
            log.warning("%s: %s", self.id, problem)
            raise TrtllmBlsError(problem)
        task = asyncio.current_task()
        # A task that ``load`` started belongs to no request and may outlive this one.
        if task is not None and CURRENT_REQUEST.get() is self:
            self._tasks.add(task)

    async def close(self) -> None:
        """End the request's calls of models that still run."""
        self._has_ended = True
        count = 0
        for task in self._tasks - {asyncio.current_task()}:
            count += not task.done()
        if count:
            line = "%s: answer left tasks behind: %d; their calls of models are ended"
            log.warning(line, self.id, count)
        for call in list(self._calls):
            call.cancel()
        if self.streams:
            # Tasks of their own end also if the caller leaves meanwhile, which cancels this one.
            await asyncio.wait([asyncio.ensure_future(stream.aclose()) for stream in self.streams])


class ChatRequest(Request):
    """A request to answer a conversation, from one of OpenAI's APIs or from Anthropic's.

    ``messages`` and ``tools``: in the form that ``LLM.chat`` takes. If the model ``accepts`` parts,
    the content of a message with a part is a list of texts and ``ContentPart``s. ``options``: the
    options of the answer, and the fields that ``StreamingModel.options`` declares; those that the
    caller did not send are absent. ``metadata``, ``user`` and ``prompt_cache_key``: as the caller
    sent them. ``headers``: those that ``--pipeline-header`` names, in lower case.
    """

    def __init__(
        self,
        call: Call,
        deployment: PipelineDeployment,
        inputs: Collection[str],
        options: Mapping[str, type] = MappingProxyType({}),
    ) -> None:
        super().__init__(call, deployment, inputs)
        chat = _checked_chat(self.text(CHAT_REQUEST))
        self.messages: list[dict[str, Any]] = chat["messages"]
        if not {*PART_INPUTS.values()}.isdisjoint(inputs):
            self.messages = with_parts(self.messages, self._arrays)
        self.tools: list[dict[str, Any]] = chat["tools"]
        self.options: dict[str, Any] = chat["options"]
        if "token_bias" in self.options:  # JSON's keys are texts
            token_bias = {}
            for key, bias in self.options["token_bias"].items():
                token_bias[int(key)] = bias
            self.options["token_bias"] = token_bias
        self.pipeline_options = options
        self.options |= _pipeline_options(options, chat["further"])
        self.metadata: dict[str, Any] = chat["metadata"]
        self.user: str | None = chat["user"]
        self.prompt_cache_key: str | None = chat["prompt_cache_key"]
        self.headers: dict[str, str] = chat["headers"]

    def sent(self, options: Mapping[str, Any], tools: Any) -> set[str]:
        names = {"messages"}
        if tools is self.tools:
            names.add("tools")
        for name, value in options.items():
            if name in self.options and self.options[name] is value:
                names.add(name)
        return names

    @property
    def parts(self) -> list[ContentPart]:
        """The images, sounds and files of the conversation, in order."""
        parts: list[ContentPart] = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                parts += [part for part in content if isinstance(part, ContentPart)]
        return parts

    def texts(self, replacement: Callable[[ContentPart], str]) -> list[dict[str, Any]]:
        """Return the messages for a language model, with ``replacement`` of each part in its place.

        It is called in the order of ``parts``.
        """
        messages = []
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                texts = []
                for part in content:
                    if isinstance(part, ContentPart):
                        part = replacement(part)
                    texts.append(part)
                message = {**message, "content": "\n".join(texts)}
            messages.append(message)
        return messages


def _pipeline_options(types: Mapping[str, type], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that the pipeline declares.

    Raises ``InvalidRequest`` for a value of a wrong type.
    """
    options = {}
    for name, kind in types.items():
        value = fields.get(name)
        if value is None:
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidRequest(name, f"{value!r:.80} is not {_JSON_TYPES[kind]}")
        options[name] = value
    return options


class FaceRequest(Request):
    """A request for ``embed``, ``speak`` or ``rerank``. ``fields``: the endpoint's request body."""

    def __init__(
        self, call: Call, deployment: PipelineDeployment, inputs: Collection[str], face: Face
    ) -> None:
        super().__init__(call, deployment, inputs)
        self.face = face
        self.fields = FaceFields(face, self.text(face.request))


def _checked_chat(text: str) -> dict[str, Any]:
    """Read the JSON text that ``engines.chat_model`` writes, or any client of Triton.

    Raises ``InvalidRequest``.
    """
    chat = json_value(text)
    if not isinstance(chat, dict):
        raise InvalidRequest(CHAT_REQUEST, "must be a JSON object")
    for name in ("messages", "tools"):
        items = chat.setdefault(name, None if name == "messages" else [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise InvalidRequest(CHAT_REQUEST, f"{name} must be a list of objects")
    if not all(isinstance(message.get("role"), str) for message in chat["messages"]):
        raise InvalidRequest(CHAT_REQUEST, "each of messages must have a role, a text")
    if not isinstance(chat.setdefault("options", {}), dict):
        raise InvalidRequest(CHAT_REQUEST, "options must be an object")
    if unknown := chat["options"].keys() - ConversationOptions.__annotations__.keys():
        raise InvalidRequest(CHAT_REQUEST, f"options: {min(unknown)} is no option; leave it out")
    bias = chat["options"].get("token_bias", {})
    if not isinstance(bias, dict) or not all(key.isdecimal() for key in bias):
        raise InvalidRequest(CHAT_REQUEST, "options.token_bias must be an object of token ids")
    for name in ("user", "prompt_cache_key"):
        if not isinstance(chat.setdefault(name, None), (str, type(None))):
            raise InvalidRequest(CHAT_REQUEST, f"{name} must be a text")
    for name in ("metadata", "headers", "further"):
        if not isinstance(chat.setdefault(name, {}), dict):
            raise InvalidRequest(CHAT_REQUEST, f"{name} must be an object")
    for name in ("key", "cache_salt"):
        if chat.get(name) is not None:
            problem = f"{name} comes with a signed parameter; an older trtllm-bls sends it here"
            raise InvalidRequest(CHAT_REQUEST, problem)
    return chat


# An item of ``StreamingModel.chat``: a text, a step of a language model, or an event by its kind:
# ``{"refusal": text}``, ``{"annotation": {…}}`` in the form of OpenAI's APIs.
ChatPart: TypeAlias = str | Step | Mapping[str, Any]


def _events(part: ChatPart) -> list[Mapping[str, Any]]:
    """Return an item of ``StreamingModel.chat`` as events."""
    if isinstance(part, str):
        part = {"text": part}
    if isinstance(part, Mapping):
        check_event(part)
        return [part] if part != {"text": ""} else []
    if not isinstance(part, Step):
        raise TrtllmBlsError(f"chat gave a {type(part).__name__}; give a text, a Step or an event")
    events: list[Mapping[str, Any]] = []
    if part.reasoning:
        events.append({"reasoning": part.reasoning})
    if part.text:
        events.append({"text": part.text})
    for call in part.calls:
        events.append({"call": {"id": call.id, "name": call.name, "arguments": call.text}})
    return events


class Response(RequestTimes):
    """The sender of one request's outputs."""

    def __init__(self, call: Call, outputs: Mapping[str, Tensor], rows: bool = False) -> None:
        super().__init__()
        self._call = call
        self._outputs = outputs
        self._has_rows = rows
        self._only_response: Mapping[str, Array] = {}  # if the model is not decoupled
        self._played_until = 0.0

    async def send(
        self, outputs: Mapping[str, Any], *, final: bool = False, seconds: float | None = None
    ) -> None:
        """Send one response: arrays, numbers, texts or bytes by the names of declared outputs.

        Waits until Triton has taken the earlier responses. Over gRPC, Triton keeps responses that
        the caller has not read in memory, without a bound. ``seconds``: the playing time of this
        response. With it, this method waits while the caller still has 2 s or more to play.
        ``final``: marks the last response; without it, an empty one follows the end of ``answer``.
        """
        if unknown := outputs.keys() - self._outputs.keys():
            remedy = suggestion(min(unknown), self._outputs)
            raise TrtllmBlsError(f"output {min(unknown)} is not declared by this model; {remedy}")
        if self.responses and not self._call.decoupled:
            raise TrtllmBlsError("this model is not decoupled and answers once per request")
        if not self._call.outbox.sequences:
            raise TrtllmBlsError("nothing can follow the last response of a request")
        try:
            arrays = {name: self._outputs[name].array(value) for name, value in outputs.items()}
        except TrtllmBlsError as error:
            raise TrtllmBlsError(f"output {error}") from error
        if self._has_rows:
            arrays = {name: array[None] for name, array in arrays.items()}
        if self._call.decoupled:
            if seconds is not None:
                if not 0 <= seconds < math.inf:
                    raise TrtllmBlsError(f"seconds: {seconds} is no time that a caller can play")
                await asyncio.sleep(self._played_until - AHEAD_S - self._clock())
                self._played_until = max(self._played_until, self._clock()) + seconds
            await self._call.ready()
            self._call.send(arrays, final)
        else:
            self._only_response = arrays  # ``finish`` sends it: ``answer`` may still fail
        self.note_response()

    def finish(self) -> None:
        """Send the only response of a model that is not decoupled, once ``answer`` has returned."""
        if not self._call.decoupled:
            if not self.responses:
                raise TrtllmBlsError("this model is not decoupled and has not answered")
            self._call.send(self._only_response, True)


class StreamingModel(ServedModel):
    """A user's own model, written as ``answer``. ``trtllm-bls new`` writes the files for it.

    Declare ``inputs`` and ``outputs``; Triton checks types and shapes before ``answer`` gets a
    request. Requests run concurrently on one event loop, so nothing in ``answer`` may block. When
    the caller leaves, the time limit (``request_timeout_seconds``) passes or the engine fails, an
    ``await`` in ``answer`` raises. The engine's work and calls of other models then end, too.
    """

    inputs: ClassVar[tuple[Tensor, ...]] = ()
    outputs: ClassVar[tuple[Tensor, ...]] = ()
    # The model's own parameters in ``config.pbtxt``. The default gives the type.
    parameters: ClassVar[Mapping[str, Value]] = {}
    # Further fields of requests of OpenAI's APIs, with the type of each: bool, int, float, str,
    # list or dict. ``ChatRequest.options`` has their values.
    options: ClassVar[Mapping[str, type]] = {}
    parameters_type = PipelineParameters
    deployment_type = PipelineDeployment
    deployment: PipelineDeployment
    owns_process = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raises ``SettingsError`` if the class replaces what this one needs, as ``end``."""
        super().__init_subclass__(**keywords)
        own = {"deployment", *dir(StreamingModel), *_OUR_WAYS} - {*dir(ABC), *_AUTHORS_NAMES}
        for base in cls.__mro__[: cls.__mro__.index(StreamingModel)]:
            for name in vars(base):
                if name in own and not name.startswith("__"):
                    remedy = _OUR_WAYS.get(name, "rename it")
                    problem = f"{base.__name__}.{name} replaces what StreamingModel needs"
                    raise SettingsError(f"{problem}; {remedy}")

    async def load(self, deployment: PipelineDeployment) -> None:
        """Called once before the first request: take ``deployment.llm()``, read files."""

    async def warm_up(self, deployment: PipelineDeployment) -> None:
        """Called once all models of the server are loaded; requests wait until it returns. Call
        other models here: ``deployment.infer``, ``deployment.stream``."""

    # With one of these methods the model also answers an endpoint of OpenAI's API, and its own
    # inputs become optional.
    # ``async def chat(self, request)``: an async generator of ``ChatPart``.
    chat: Callable[..., Any] | None = None
    # ``accepts``: the kinds of ``ContentPart`` in its conversations: image, audio, file.
    accepts: ClassVar[Collection[str]] = frozenset()
    # ``async def embed(self, texts)``: an array of one vector for each text. The texts may come
    # from several requests. ``dimensions``: lengths that the vectors may be truncated to.
    embed: Any = None
    dimensions: ClassVar[tuple[int, ...]] = ()
    # ``async def speak(self, text, voice)``: an async generator of sound, as ``speech`` declares.
    speak: Callable[..., Any] | None = None
    speech: ClassVar[Speech] = Speech()
    # ``async def rerank(self, query, documents)``: an array of one score for each document.
    rerank: Callable[..., Any] | None = None

    async def answer(self, request: Request, response: Response) -> None:
        """Answer one request. An ``InvalidRequest`` becomes the caller's error INVALID_ARG."""
        inputs, _ = face_tensors(type(self))
        names = " or ".join(tensor.name for tensor in inputs) or "answer"
        raise InvalidRequest(names, "is missing; this model answers nothing else")

    @classmethod
    def tensors(cls) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return all inputs and outputs, those of endpoints included."""
        face_inputs, face_outputs = face_tensors(cls)
        if not face_inputs:
            return cls.inputs, cls.outputs
        inputs = [replace(tensor, required=False) for tensor in cls.inputs]
        return (*inputs, *face_inputs), (*cls.outputs, *face_outputs)

    async def run_in_thread(
        self,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kw: _Arguments.kwargs,
    ) -> _Result:
        """Run a function that takes more than a few milliseconds in a thread; return its result.

        It holds up no other request there. The end of the request does not end it.
        """
        return await self._server.run_in_thread(partial(function, *args, **kw))

    async def unload(self) -> None:
        """Called once after the last request."""

    def initialize(self, args: Mapping[str, str], pb_utils: Any = None) -> None:
        config = json.loads(args["model_config"])
        if (rows := int(config.get("max_batch_size", 0))) > 1:
            problem = f"max_batch_size: {rows}: a pipeline answers one row at a time; write 0 or 1"
            raise SettingsError(f"model {args['model_name']}: {problem}")
        if rows and face_tensors(type(self))[0]:
            raise SettingsError(f"max_batch_size: {rows}: a model with chat needs 0")
        self._faces = Faces(self)
        self._has_rows = rows == 1
        inputs, outputs = self.tensors()
        self._input_names = list(by_name(inputs))
        self._output_tensors = by_name(outputs)
        for option, kind in self.options.items():
            if kind not in _JSON_TYPES:
                remedy = "write bool, int, float, str, list or dict"
                raise SettingsError(f"options = {{{option!r}: {kind!r}}}: {remedy}")
            if option in ConversationOptions.__annotations__:
                raise SettingsError(f"options: {option!r} is an option of every chat; rename it")
        for tensor in (*self.inputs, *self.outputs):
            if tensor.dtype == "BF16":
                raise SettingsError(f"{tensor.name}: Triton gives a Python model no BF16; use FP32")
        self._admitted: set[Request] = set()
        self._warm_up_task: asyncio.Future[None] | None = None
        self._warm_up_failed = False  # at least once; it runs again
        self._config = config
        self._directory = Path(args["model_repository"])
        super().initialize(args, pb_utils)

    def make(self, parameters: Any) -> None:
        texts: dict[str, str] = {}
        for key, value in self._config.get("parameters", {}).items():
            texts[key] = str(value["string_value"])
        for problem in undeclared_parameters(texts, self.parameters):
            log.warning("%s", problem)
        self.deployment.parameters = own_parameters(self.deployment.name, texts, self.parameters)
        # ``serve`` closes Triton's API that lists a server's models, so read the repository.
        files = self._directory.parent.glob("*/config.pbtxt")
        models = self.deployment.other_models
        models.names = models.names or {file.parent.name for file in files}

    async def begin(self) -> None:
        try:
            await self.load(self.deployment)
        except TrtllmBlsError:
            raise
        except BaseException as raised:
            error = _reported_error(raised, f"model {self.deployment.name}: load")
            if error is raised:
                raise
            raise error from raised
        if type(self).warm_up is not StreamingModel.warm_up:
            self._warm_up_task = asyncio.ensure_future(self._warm_up())

    async def _warm_up(self) -> None:
        """Run ``warm_up`` until it succeeds. Until then the server is not ready for this model."""
        name = self.deployment.name
        pause = 0.0
        while True:
            self.deployment.warm_up_problem = f"{name}: its warm_up has not ended"
            try:
                await self._warm_up_once()
            except BaseException as raised:
                if self._warm_up_task is None and not isinstance(raised, Exception):
                    raise  # the model is being unloaded
                pause = _WARM_UP_BACKOFF.after(pause)
                self._warm_up_failed = True
                self.deployment.warm_up_problem = f"{name}: its warm_up failed: {one_line(raised)}"
                log.exception("warm_up failed; it is tried again in %g s", pause)
            else:
                self.deployment.warm_up_problem = ""
                return
            await asyncio.sleep(pause)

    async def _warm_up_once(self) -> None:
        """Wait for the other models, and warm up. The log names a step that takes long."""
        step = "the other models of this server"

        async def log_progress() -> None:
            seconds = 0
            while True:
                await asyncio.sleep(_WARM_UP_LOG_SECONDS)
                seconds += _WARM_UP_LOG_SECONDS
                log.warning("the warm-up waits for %s, for %d s now", step, seconds)

        progress = asyncio.ensure_future(log_progress())
        try:
            await self.deployment.other_models.ready()
            step = "its method warm_up"
            await self.warm_up(self.deployment)
        finally:
            progress.cancel()

    async def _warm_up_end(self) -> None:
        """Wait for the first ``warm_up``. Raises ``EngineUnavailable`` if it has failed."""
        if self._warm_up_task is None or self._warm_up_task.done():
            return
        if self._warm_up_failed:
            raise EngineUnavailable(self.deployment.warm_up_problem)
        await asyncio.shield(self._warm_up_task)

    async def end(self) -> None:
        task = self._warm_up_task
        self._warm_up_task = None
        if task is not None:
            task.cancel()
        await self.unload()

    async def handle(self, call: Call) -> None:
        request = self._request(call)
        response = Response(call, self._output_tensors, self._has_rows)
        CURRENT_REQUEST.set(request)
        self.deployment.unfinished.add(response)
        error: BaseException | None = None
        seconds = self.deployment.defaults.timeout_s
        timeout_problem = f"the time limit of {seconds or 0:g} s is over"
        callers_seconds = call.context.seconds
        if callers_seconds is not None and (seconds is None or callers_seconds < seconds):
            seconds = callers_seconds
            callers = " → ".join(request.callers)
            timeout_problem = f"the time of the request that {callers} answers is over"
        limit = timeout(seconds)
        try:
            async with limit, self._admission(request):
                if seconds is not None:
                    request.deadline = response.arrived_at + seconds
                response.begun_at = asyncio.get_running_loop().time()
                await self._warm_up_end()
                if isinstance(request, ChatRequest):
                    await self._chat(request, response)
                elif isinstance(request, FaceRequest):
                    await self._faces.answer(request.face, request.fields, response.send)
                    end = face_end(request.prompt_tokens, request.tokens)
                    await response.send(end, final=True)
                else:
                    await self.answer(request, response)
            response.finish()
        except BaseException as raised:
            if isinstance(raised, asyncio.TimeoutError) and has_expired(limit):
                error = DeadlineExceeded(timeout_problem)
            else:
                error = _reported_error(raised, is_cancelled=call.cancel_cause is not None)
            if error is raised:  # an error that is its own cause is a reference cycle
                raise
            raise error from raised
        finally:
            try:
                await request.close()
            finally:  # also if the caller leaves meanwhile, which cancels this task
                self.deployment.unfinished.discard(response)
                stats = stats_of(
                    request.id,
                    error,
                    request.finish_reason,
                    prompt_tokens=request.prompt_tokens,
                    completion_tokens=request.tokens,
                    traceparent=request.traceparent,
                )
                response.add_to(stats, streamed=True)
                self.deployment.reports.add(stats)
                error = None  # its traceback refers to this frame, which would be a reference cycle

    def _request(self, call: Call) -> Request:
        """Return the request of a chat, of a face, or for ``answer``."""
        if CHAT_REQUEST in call.arrays:
            return ChatRequest(call, self.deployment, self._input_names, self.options)
        face = requested_face(call.arrays)
        if face is not None:
            return FaceRequest(call, self.deployment, self._input_names, face)
        return Request(call, self.deployment, self._input_names, self._has_rows)

    @asynccontextmanager
    async def _admission(self, request: Request) -> AsyncIterator[None]:
        """Wait for a place of the deployment's admission, and hold it in the context.

        Raises ``CallChainTooLong``, and ``CycleWithoutPlace`` if every request that holds a place
        may wait for this one.
        """
        chain = (*request.callers, self.deployment.name)
        if len(request.callers) > MAX_CALL_DEPTH:
            raise CallChainTooLong.of(chain, MAX_CALL_DEPTH)
        admission = self.deployment.admission
        if request.callers and not admission.has_place:
            callers = {*request.callers}
            all_wait = True
            for admitted in self._admitted:
                all_wait = all_wait and not callers.isdisjoint(admitted.called)
            if self.deployment.name in callers or all_wait:
                raise CycleWithoutPlace.of(chain, admission.places)
        async with admission.acquire(1):
            self._admitted.add(request)
            try:
                yield
            finally:
                self._admitted.discard(request)

    async def _chat(self, request: ChatRequest, response: Response) -> None:
        assert self.chat is not None  # a model without it has no such input
        async with aclosing(self.chat(request)) as parts:
            async for part in parts:
                if events := _events(part):
                    await response.send({CHAT_EVENTS: json.dumps(events)})
        end = {
            "finish_reason": request.finish_reason,
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.tokens,
        }
        await response.send({CHAT_EVENTS: json.dumps([{"end": end}])}, final=True)


def undeclared_parameters(keys: Iterable[str], declarations: Iterable[str]) -> Iterator[str]:
    """Yield a line for each parameter in a pipeline's configuration that nobody declares."""
    known_keys = [*parameters_in(PipelineParameters), *map(str, declarations), *COMMON_KEYS]
    for key in sorted({*keys} - {*known_keys}):
        yield f"parameter {key} is not declared by this model; {suggestion(key, known_keys)}"


def own_parameters(
    model: str, texts: Mapping[str, str], defaults: Mapping[str, Value]
) -> dict[str, Value]:
    """Return a pipeline's own parameters: the configuration's values, or the defaults.

    Raises ``SettingsError`` for a value of a wrong type.
    """
    for key, default in defaults.items():
        if not isinstance(key, str) or type(default) not in _PARAMETER_KINDS:
            remedy = "write a name, and a text, a number, True or False"
            raise SettingsError(f"model {model}: parameters = {{{key!r}: {default!r}}}: {remedy}")
    values = {}
    for key, default in defaults.items():
        parameter = Parameter(_PARAMETER_KINDS[type(default)], "", str(default))
        values[key] = parameter.parse(model, key, texts.get(key, ""))
    return values


def _reported_error(
    raised: BaseException, method: str = "answer", *, is_cancelled: bool = False
) -> BaseException:
    """Return the error that reports an exception of the pipeline's method.

    A refusal of a value that the caller sent is an ``InvalidRequest``, and a failure of an engine
    or another model an ``EngineError``. Anything else is a ``Defect`` of the pipeline, except a
    time limit of its own. The failures of a task group keep their texts. ``SystemExit`` would end
    the event loop, and a cancellation of the pipeline's own would look as if the caller had left,
    so both are reported as a ``RuntimeError``. ``is_cancelled``: the server cancelled the request.
    """
    group = []
    for error in getattr(raised, "exceptions", ()):
        group.append(_reported_error(error, method, is_cancelled=is_cancelled))
    for error in group:
        if not isinstance(error, TrtllmBlsError):
            return error
    if group:
        return _combined(group)
    if isinstance(raised, EngineRefusal):
        return raised.callers_mistake or Defect(str(raised))
    if type(raised) is TrtllmBlsError:  # the pipeline misused this package
        return Defect(str(raised))
    if isinstance(raised, asyncio.TimeoutError):
        log.error("a time limit of the pipeline's own is over", exc_info=raised)
        return DeadlineExceeded(f"a time limit in {method} is over; the server's log tells which")
    cancelled_itself = isinstance(raised, asyncio.CancelledError) and not is_cancelled
    if cancelled_itself or isinstance(raised, (SystemExit, KeyboardInterrupt)):
        return RuntimeError(f"{method} raised {raised!r}")
    return raised


def _combined(errors: Sequence[BaseException]) -> BaseException:
    """Return one error for several, of the kind that they have in common."""
    texts = list(dict.fromkeys(map(str, errors)))
    if len(texts) == 1:
        return errors[0]
    mistakes = [error for error in errors if isinstance(error, InvalidRequest)]
    if len(mistakes) == len(errors):
        # The first text begins with the field, which the new error adds again.
        problems = [mistakes[0].problem, *texts[1:]]
        return InvalidRequest(mistakes[0].field, "; ".join(problems))
    if any(isinstance(error, Defect) for error in errors):
        return Defect("; ".join(texts))
    return EngineError("; ".join(texts))
