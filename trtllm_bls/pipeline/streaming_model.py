"""A Triton model that a user writes as one async function (docs/pipelines.md).

``trtllm_bls.pipeline`` names what is for users.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import weakref
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
from trtllm_bls.pipeline.language_model import CALLER, LLM, ConversationOptions, Step, Steps
from trtllm_bls.pipeline.other_models import CallOptions, Origin, OtherModels, OtherStream
from trtllm_bls.pipeline.sessions import Session, SessionStore
from trtllm_bls.settings.engine_tls import engine_tls
from trtllm_bls.settings.faces import PART_INPUTS, Face
from trtllm_bls.settings.model_config import CHAT_EVENTS, CHAT_REQUEST
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
from trtllm_bls.wire.contract import Tensor
from trtllm_bls.wire.traceparent import valid_traceparent

if sys.version_info >= (3, 11):
    from typing import ParamSpec, Unpack
else:
    from typing_extensions import ParamSpec, Unpack

__all__ = ["EngineError", "InvalidRequest", "Step", "Tensor"]  # for ``trtllm_bls.pipeline``

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
Value: TypeAlias = bool | int | float | str
_WARM_UP_PAUSE = Backoff(1.0, 60.0)  # seconds between two tries
_WARM_UP_LOG_SECONDS = 10  # between two lines on what a warm-up waits for
_PARAMETER_KINDS = {
    bool: FLAG,
    int: Kind("a whole number", int),
    float: Kind("a number", float),
    str: TEXT,
}
# The types of a pipeline's own options, and what they are called in an error.
_JSON_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}
AHEAD_S = 2.0  # of playing time that ``Response.send`` lets a caller have in advance

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
    """The language model at ``engine``, in any asyncio program.

    ``engine``: ``trtllm://HOST:PORT`` or ``triton+grpc://HOST:PORT/MODEL``. ``tokenizer``: the
    directory of its tokenizer. ``parameters``: of ``tensorrt_llm_bls`` (docs/parameters.md), such
    as ``request_timeout_seconds``. Raises ``SetupError``.
    """
    given = {"engine": engine, "tokenizer_dir": os.path.abspath(tokenizer)} | parameters
    texts = {key: {"string_value": str(value)} for key, value in given.items()}
    arguments = {
        "model_config": json.dumps({"name": BLS_NAME, "parameters": texts}),
        "model_repository": str(Path.cwd() / BLS_NAME),
    }
    deployment = PipelineDeployment(Parameters(arguments, {}).read(PipelineParameters))
    try:
        yield await asyncio.to_thread(deployment.llm)
    finally:
        await deployment.close()


# --- a model of your own ----------------------------------------------------------------------


class PipelineDeployment(BaseDeployment):
    """What a pipeline has at hand from its load on.

    ``parameters``: its own (``StreamingModel.parameters``), with the values in ``config.pbtxt``.
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
        directory = parameters.session_dir
        self.sessions = SessionStore(Path(directory) if directory else None)
        self.other_models = OtherModels(parameters.engine_url, engine_tls(parameters))
        self._llms: dict[tuple[str, ...], LLM] = {}
        self._orchestrators: list[Orchestrator] = []

    async def engine_problems(self) -> dict[str, str]:
        """As of the engines; until ``warm_up`` has succeeded, its problem stands for them."""
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
        """The language model that the parameters name, or another one.

        ``name``: of a model of this server, or an address as the parameter ``engine`` has it.
        ``tokenizer``: the directory of its tokenizer, by default ``tokenizer_dir``.
        ``tool_parser`` and ``reasoning_parser``: how it writes calls and reasoning; by default the
        parameters of these names say so, and of another tokenizer its chat template. Takes seconds
        where it is called first. Raises ``SetupError``.
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
            self._llms[key] = self._opened(parameters)
        return self._llms[key]

    def chat_parameters(
        self,
        tokenizer: str | os.PathLike[str] | None,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> PipelineParameters:
        """The parameters of a language model that is opened so. Raises ``SettingsError``."""
        parameters: PipelineParameters = self._parameters
        if tokenizer is not None:
            directory = Path(tokenizer)
            if directory != parameters.tokenizer_dir:  # a family of its own
                tool_parser = tool_parser or "auto"
                reasoning_parser = reasoning_parser or "auto"
            parameters = replace(parameters, tokenizer_dir=directory)
        chosen = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
        known = parameters_in(PipelineParameters)
        for key, parser in chosen.items():
            if parser is not None:
                value = known[key].parse(self.name, key, parser)
                parameters = replace(parameters, **{key: value})
        return parameters

    def _opened(self, parameters: PipelineParameters) -> LLM:
        assert parameters.tokenizer_dir is not None
        tokenizer = load_tokenizer(parameters.tokenizer_dir, hides_torch=False)
        engine = self.open(parameters, tokenizer)
        # The pipeline's request has been admitted and is reported; its parts are neither.
        self._orchestrators.append(Orchestrator(tokenizer, engine, defaults_of(parameters)))
        return LLM(
            self._orchestrators[-1],
            tokenizer,
            parameters.tool_parser,
            parameters.reasoning_parser,
        )

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> dict[str, Array]:
        """As ``Request.infer``, for the request of this task, or for none in ``warm_up``."""
        if isinstance(caller := CALLER.get(), Request):
            return await caller.infer(model, inputs, outputs, **options)
        return await self.other_models.infer(model, inputs, outputs, Origin(self.name), **options)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> OtherStream:
        """As ``Request.stream``, for the request of this task, or for none in ``warm_up``."""
        if isinstance(caller := CALLER.get(), Request):
            return caller.stream(model, inputs, outputs, **options)
        return self.other_models.stream(model, inputs, outputs, Origin(self.name), **options)

    def load(self) -> Load:
        """Of the pipeline's requests: those without a response wait."""
        responses = self.unfinished.copy()
        waiting = sum(not response.responses for response in responses)
        tokens = sum(orchestrator.load().tokens for orchestrator in self._orchestrators)
        return Load(len(responses) - waiting, waiting, self.admission.queued, tokens)

    @property
    def handed_over(self) -> bool:
        """A pipeline may call a model until it has ended."""
        return not self.unfinished

    async def close(self) -> None:
        await self.other_models.close()
        await super().close()
        await asyncio.to_thread(self.sessions.close)


class Request:
    """One request: its inputs by name (``request["wav"]``), as Triton gives them.

    ``id`` is unique in the process, ``client_id`` the caller's own. ``parameters``: the request's,
    as the caller sent them. ``traceparent``: the caller's trace context (W3C). ``key``: a digest of
    the client's API key, if there are keys. ``cache_salt``: which KV cache blocks the caller may
    share. ``callers``: the pipelines that wait for this request, the one that the client called
    first. ``session``: what the model remembers of the conversation; None: the request is part of
    none. The request's calls of all models have these, too. ``tokens``, ``prompt_tokens``: of the
    language model's answers so far; ``finish_reason``: of the last one.
    """

    own_options: Collection[str] = ()  # of ``ChatRequest.options``, which no language model has

    def __init__(
        self,
        call: Call,
        deployment: PipelineDeployment,
        inputs: Collection[str] = (),
        rows: bool = False,
    ) -> None:
        self._arrays = call.arrays
        self._other_models = deployment.other_models
        self._inputs = inputs
        if rows:
            self._arrays = {name: array[0] for name, array in call.arrays.items()}
        self._texts: dict[str, str] = {}  # that were read, by the names of their inputs
        self.id = call.id
        self.client_id = call.client_id
        self.parameters: dict[str, Any] = json.loads(call.parameters)
        self.parameters.pop(CONTEXT_PARAMETER, None)
        trace = self.parameters.get("traceparent")
        self.traceparent = valid_traceparent(trace) if isinstance(trace, str) else None
        self.key = call.context.key
        self.cache_salt = call.context.cache_salt
        self.callers = call.context.models
        self.session: Session | None = None
        session = call.context.session
        if session is None and call.sequence_id:
            session = f"sequence {call.sequence_id}"
        if session is not None:
            self.session = Session(deployment.sessions, deployment.name, self.key, session)
        self._model = deployment.name
        self.limit: float | None = None  # when its time is over, by the event loop's clock
        self.tokens = self.prompt_tokens = 0
        self.finish_reason = "stop"
        # What ``close`` ends, unless it has ended. One that nobody refers to any more ends itself.
        self.streams: weakref.WeakSet[Steps | OtherStream] = weakref.WeakSet()
        self._calls: dict[asyncio.Future[dict[str, Array]], str] = {}  # of which model
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # that called a model
        self._over = False

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            hint = "" if name in self._inputs else nearest(name, self._inputs)
            raise InvalidRequest(name, f"is missing; {hint}".rstrip("; "))
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def text(self, name: str) -> str:
        """Return the one text of an input of type STRING. Raises ``InvalidRequest``."""
        values = self[name].reshape(-1).tolist()
        if len(values) != 1:
            raise InvalidRequest(name, f"{len(values)} texts; send one")
        try:
            text = str(values[0], "utf-8") if isinstance(values[0], bytes) else str(values[0])
        except UnicodeDecodeError as error:
            raise InvalidRequest(name, f"is not UTF-8: {error.reason}") from error
        self._texts[name] = text
        return text

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] = (),
        **options: Unpack[CallOptions],
    ) -> dict[str, Array]:
        """The response of another model of this server. ``outputs``: those wanted; none = all.

        Values become the types and shapes that the model declares, exactly. Cancelled with the
        request. Raises ``TrtllmBlsError`` for a value that does not fit, ``EngineError`` for what
        the model answers, ``EngineUnavailable`` while the server cannot be reached.
        """
        self._check(f"a call of {model}")
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
        """The responses of a decoupled model of this server, one by one; otherwise as ``infer``.

        ``aclose`` ends the model's work, as dropping the stream and the end of the request do.
        """
        origin = self._origin()
        stream = self._other_models.stream(model, inputs, outputs, origin, self.ended, **options)
        self.begins(stream)
        return stream

    @property
    def called(self) -> set[str]:
        """The other models that the request has called and that have not ended."""
        streams = [stream for stream in self.streams if isinstance(stream, OtherStream)]
        return {*self._calls.values(), *[stream.model for stream in streams]}

    def _origin(self) -> Origin:
        return Origin(self.id, self.traceparent, self._context)

    def _context(self) -> CallContext:
        """On whose behalf a model is called now."""
        seconds = None
        if self.limit is not None:
            seconds = max(0.0, self.limit - asyncio.get_running_loop().time())
        return CallContext(
            key=self.key,
            cache_salt=self.cache_salt,
            session=None if self.session is None else self.session.id,
            seconds=seconds,
            models=(*self.callers, self._model),
        )

    def sent(self, options: Mapping[str, Any], tools: Any) -> set[str]:
        """Return which of these the caller sent as they are, and ``messages`` if it sent some."""
        return set()

    def input_with(self, text: str) -> str | None:
        """Return the name of the input that has this text."""
        return next((name for name, value in self._texts.items() if value == text), None)

    def begins(self, call: Steps | OtherStream) -> None:
        """Note what has to end with the request. Raises where the request has ended."""
        self._check("an answer")
        self.streams.add(call)

    def ended(self, call: Steps | OtherStream) -> None:
        """Forget what has ended."""
        self.streams.discard(call)

    def _check(self, what: str) -> None:
        if self._over:
            problem = f"{what} was asked for after the request had ended; await it in answer"
            log.warning("%s: %s", self.id, problem)
            raise TrtllmBlsError(problem)
        task = asyncio.current_task()
        if task is not None and CALLER.get() is self:  # one that ``load`` began is no request's
            self._tasks.add(task)

    async def close(self) -> None:
        """End what the request has begun and not ended."""
        self._over = True
        if count := sum(not task.done() for task in self._tasks - {asyncio.current_task()}):
            line = "%s: answer left tasks behind: %d; their calls of models are ended"
            log.warning(line, self.id, count)
        for stream in list(self.streams):
            await stream.aclose()
        for call in list(self._calls):
            call.cancel()


class ChatRequest(Request):
    """A request to answer a conversation, of one of OpenAI's APIs or of Anthropic's.

    ``messages`` and ``tools`` are as ``LLM.chat`` takes them. Where the model ``accepts`` parts,
    the content of a message with one is a list of texts and of ``ContentPart``.
    ``options`` has what the caller asks of the answer, and of the fields that the API does not have
    those that ``StreamingModel.options`` declares; what was not sent is absent. ``metadata``,
    ``user`` and ``prompt_cache_key`` are the caller's, ``headers`` those that
    ``--pipeline-header`` names, in lower case.
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
        if {*PART_INPUTS.values()}.intersection(inputs):
            self.messages = with_parts(self.messages, self._arrays)
        self.tools: list[dict[str, Any]] = chat["tools"]
        self.options: dict[str, Any] = chat["options"]
        if "token_bias" in self.options:  # whose keys JSON has as texts
            bias = self.options["token_bias"]
            self.options["token_bias"] = {int(key): value for key, value in bias.items()}
        self.own_options = options
        self.options |= _own_options(options, chat["further"])
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
                pieces = []
                for part in content:
                    pieces.append(replacement(part) if isinstance(part, ContentPart) else part)
                message = {**message, "content": "\n".join(pieces)}
            messages.append(message)
        return messages


def _own_options(declared: Mapping[str, type], sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a pipeline declares, as far as they were sent.

    Raises ``InvalidRequest`` for a value of another type.
    """
    options = {}
    for name, kind in declared.items():
        value = sent.get(name)
        if value is None:
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidRequest(name, f"{value!r:.80} is not {_JSON_TYPES[kind]}")
        options[name] = value
    return options


class FaceRequest(Request):
    """A request for ``embed``, ``speak`` or ``rerank``; ``fields``: what the endpoint was sent."""

    def __init__(
        self, call: Call, deployment: PipelineDeployment, inputs: Collection[str], face: Face
    ) -> None:
        super().__init__(call, deployment, inputs)
        self.face = face
        self.fields = FaceFields(face, self.text(face.request))


def _checked_chat(text: str) -> dict[str, Any]:
    """What ``engines.chat_model`` sends, which any client of Triton may send, too.

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


# What ``StreamingModel.chat`` gives: text, a step of a language model, or an event by its kind:
# ``{"refusal": text}``, ``{"annotation": {…}}`` as OpenAI's APIs have annotations.
ChatPart: TypeAlias = str | Step | Mapping[str, Any]


def _events(part: ChatPart) -> list[Mapping[str, Any]]:
    if isinstance(part, str):
        part = {"text": part}
    if isinstance(part, Mapping):
        check_event(part)
        return [part] if part != {"text": ""} else []
    if not isinstance(part, Step):
        raise TrtllmBlsError(f"chat gave a {type(part).__name__}; give a text, a Step or an event")
    texts = [{kind: text} for kind in ("reasoning", "text") if (text := getattr(part, kind))]
    calls = [
        {"call": {"id": call.id, "name": call.name, "arguments": call.text}} for call in part.calls
    ]
    return [*texts, *calls]


class Response(RequestTimes):
    """Where the outputs of one request go."""

    def __init__(self, call: Call, declared: Mapping[str, Tensor], rows: bool = False) -> None:
        super().__init__()
        self._call, self._declared, self._rows = call, declared, rows
        self._whole: Mapping[str, Array] = {}
        self._played_until = 0.0

    async def send(
        self, outputs: Mapping[str, Any], *, final: bool = False, seconds: float | None = None
    ) -> None:
        """Send one response: arrays, numbers, texts or bytes by the names of declared outputs.

        Waits until Triton has taken earlier ones. Over gRPC, Triton keeps what the caller has not
        read, in memory and without a bound. ``seconds``: how long the caller takes to play it; then
        this waits while the caller has 2 s or more to play. ``final``: the last one; without it the
        end of ``answer`` ends the response.
        """
        if unknown := outputs.keys() - self._declared.keys():
            mend = suggestion(min(unknown), self._declared)
            raise TrtllmBlsError(f"output {min(unknown)} is not declared by this model; {mend}")
        if self.responses and not self._call.decoupled:
            raise TrtllmBlsError("this model is not decoupled and answers once per request")
        if not self._call.outbox.sequences:
            raise TrtllmBlsError("nothing can follow the last response of a request")
        try:
            arrays = {name: self._declared[name].array(value) for name, value in outputs.items()}
        except TrtllmBlsError as error:
            raise TrtllmBlsError(f"output {error}") from error
        if self._rows:
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
            self._whole = arrays  # leaves when nothing can go wrong any more
        self.note_response()

    def finish(self) -> None:
        """``answer`` has returned: send the one response of a model that is not decoupled."""
        if not self._call.decoupled:
            if not self.responses:
                raise TrtllmBlsError("this model is not decoupled and has not answered")
            self._call.send(self._whole, True)


class StreamingModel(ServedModel):
    """A model of a user's own, written as ``answer``; ``trtllm-bls new`` writes the files for it.

    Declare ``inputs`` and ``outputs``; Triton checks types and shapes before ``answer`` sees a
    request. Requests run concurrently on one event loop, so nothing in ``answer`` may block. A
    caller that leaves, the time limit (``request_timeout_seconds``) and a failure end ``answer`` by
    an exception at its ``await``, and with it the engine's work and calls of other models.
    """

    inputs: ClassVar[tuple[Tensor, ...]] = ()
    outputs: ClassVar[tuple[Tensor, ...]] = ()
    # Its own parameters in ``config.pbtxt``, with their defaults, of which each has the type.
    parameters: ClassVar[Mapping[str, Value]] = {}
    # Fields of requests of OpenAI's APIs that it reads beside theirs, with the type of each: bool,
    # int, float, str, list or dict. They come in ``ChatRequest.options``.
    options: ClassVar[Mapping[str, type]] = {}
    parameters_type = PipelineParameters
    deployment_type = PipelineDeployment
    deployment: PipelineDeployment
    owns_process = False

    async def load(self, deployment: PipelineDeployment) -> None:
        """Called once before the first request: take ``deployment.llm()``, read files."""

    async def warm_up(self, deployment: PipelineDeployment) -> None:
        """Called once the server answers, which it does when all of its models are loaded; requests
        wait for its end. Call other models here: ``deployment.infer``, ``deployment.stream``."""

    # Where a subclass has one of these, with these arguments, the model also answers an endpoint of
    # OpenAI's API, and its own inputs are optional.
    # ``async def chat(self, request)``: an async generator of ``ChatPart``.
    chat: Callable[..., Any] | None = None
    # ``accepts``: which of image, audio and file its conversations may have as ``ContentPart``.
    accepts: ClassVar[Collection[str]] = frozenset()
    # ``async def embed(self, texts)``: an array of one vector for each text, which may be of
    # several requests. ``dimensions``: lengths that the vectors may be cut to.
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
        """Run a function that takes more than a few milliseconds, and return what it returns.

        It runs in a thread of its own, where it holds up no request. The end of the request does
        not end it.
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
        self._rows = rows == 1
        inputs, outputs = self.tensors()
        self._inputs = [tensor.name for tensor in inputs]
        self._declared = {tensor.name: tensor for tensor in outputs}
        for option, kind in self.options.items():
            if kind not in _JSON_TYPES:
                mend = "write bool, int, float, str, list or dict"
                raise SettingsError(f"options = {{{option!r}: {kind!r}}}: {mend}")
            if option in ConversationOptions.__annotations__:
                raise SettingsError(f"options: {option!r} is an option of every chat; rename it")
        for tensor in (*self.inputs, *self.outputs):
            if tensor.dtype == "BF16":  # of a Python model's tensors
                raise SettingsError(f"{tensor.name}: Triton gives a Python model no BF16; use FP32")
        self._running: set[Request] = set()  # those that have a place
        self._warm: asyncio.Future[None] | None = None
        self._warm_up_failed = False  # and is tried again
        self._config, self._directory = config, Path(args["model_repository"])
        super().initialize(args, pb_utils)

    def make(self, parameters: Any) -> None:
        name, declared = self.deployment.name, self._config.get("parameters", {})
        texts = {key: str(value["string_value"]) for key, value in declared.items()}
        for problem in undeclared(texts, self.parameters):
            log.warning("%s", problem)
        self.deployment.parameters = own_parameters(name, texts, self.parameters)
        # Of the files: ``serve`` closes the API that lists a server's models.
        files = self._directory.parent.glob("*/config.pbtxt")
        models = self.deployment.other_models
        models.names = models.names or {file.parent.name for file in files}

    async def begin(self) -> None:
        try:
            await self.load(self.deployment)
        except BaseException as raised:
            error = raised
            if not isinstance(raised, TrtllmBlsError):
                error = _told(raised, f"model {self.deployment.name}: load")
            if error is raised:
                raise
            raise error from raised
        if type(self).warm_up is not StreamingModel.warm_up:
            self._warm = asyncio.ensure_future(self._warm_up())

    async def _warm_up(self) -> None:
        """Run ``warm_up`` until it succeeds; until then the server is not ready for this model."""
        name = self.deployment.name
        pause = 0.0
        while True:
            self.deployment.warm_up_problem = f"{name}: its warm_up has not ended"
            try:
                await self._warm_up_once()
            except BaseException as raised:
                if self._warm is None and not isinstance(raised, Exception):
                    raise  # the model ends meanwhile
                pause = _WARM_UP_PAUSE.after(pause)
                self._warm_up_failed = True
                self.deployment.warm_up_problem = f"{name}: its warm_up failed: {one_line(raised)}"
                log.exception("warm_up failed; it is tried again in %g s", pause)
            else:
                self.deployment.warm_up_problem = ""
                return
            await asyncio.sleep(pause)

    async def _warm_up_once(self) -> None:
        """Wait for the other models and warm up; the log tells what takes long."""
        step = "the other models of this server"

        async def tell() -> None:
            seconds = 0
            while True:
                await asyncio.sleep(_WARM_UP_LOG_SECONDS)
                seconds += _WARM_UP_LOG_SECONDS
                log.warning("the warm-up waits for %s, for %d s now", step, seconds)

        teller = asyncio.ensure_future(tell())
        try:
            await self.deployment.other_models.ready()
            step = "its method warm_up"
            await self.warm_up(self.deployment)
        finally:
            teller.cancel()

    async def end(self) -> None:
        warm, self._warm = self._warm, None
        if warm is not None:
            warm.cancel()
        await self.unload()

    async def handle(self, call: Call) -> None:
        request: Request
        face = requested_face(call.arrays)
        if CHAT_REQUEST in call.arrays:
            request = ChatRequest(call, self.deployment, self._inputs, self.options)
        elif face is not None:
            request = FaceRequest(call, self.deployment, self._inputs, face)
        else:
            request = Request(call, self.deployment, self._inputs, self._rows)
        response = Response(call, self._declared, self._rows)
        CALLER.set(request)
        self.deployment.unfinished.add(response)
        error: BaseException | None = None
        seconds = self.deployment.defaults.timeout_s
        too_late = f"the time limit of {seconds or 0:g} s is over"
        left = call.context.seconds
        if left is not None and (seconds is None or left < seconds):
            seconds = left
            too_late = f"the time of the request that {' → '.join(request.callers)} answers is over"
        limit = timeout(seconds)
        try:
            async with limit, self._place(request):
                if seconds is not None:
                    request.limit = response.arrived_at + seconds
                response.begun_at = asyncio.get_running_loop().time()
                if self._warm is not None and not self._warm.done():
                    if self._warm_up_failed:
                        raise EngineUnavailable(self.deployment.warm_up_problem)
                    await asyncio.shield(self._warm)
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
                error = DeadlineExceeded(too_late)
            else:
                error = _told(raised, is_cancelled=call.cancelled is not None)
            if error is raised:  # as its own cause it would be a reference cycle
                raise
            raise error from raised
        finally:
            await request.close()
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
            error = None  # whose traceback refers to this frame: a reference cycle

    @asynccontextmanager
    async def _place(self, request: Request) -> AsyncIterator[None]:
        """A place for a request while the context is entered; waits for it.

        Raises ``CallChainTooLong``, and ``CycleWithoutPlace`` where those that have the places may
        wait for the request itself.
        """
        chain = (*request.callers, self.deployment.name)
        if len(request.callers) > MAX_CALL_DEPTH:
            raise CallChainTooLong.of(chain, MAX_CALL_DEPTH)
        admission = self.deployment.admission
        if request.callers and not admission.has_place:
            waiting = {*request.callers}
            all_wait = all(running.called & waiting for running in self._running)
            if self.deployment.name in waiting or all_wait:
                raise CycleWithoutPlace.of(chain, admission.places)
        async with admission.acquire(1):
            self._running.add(request)
            try:
                yield
            finally:
                self._running.discard(request)

    async def _chat(self, request: ChatRequest, response: Response) -> None:
        assert self.chat is not None  # or there would be no such input
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


def undeclared(texts: Iterable[str], declared: Iterable[str]) -> Iterator[str]:
    """A line for each parameter of a pipeline's configuration that neither it nor we know."""
    known = [*parameters_in(PipelineParameters), *map(str, declared), *COMMON_KEYS]
    for key in sorted({*texts} - {*known}):
        yield f"parameter {key} is not declared by this model; {suggestion(key, known)}"


def own_parameters(
    model: str, texts: Mapping[str, str], declared: Mapping[str, Value]
) -> dict[str, Value]:
    """A pipeline's own parameters: what the configuration says, or the default.

    Raises ``SettingsError`` for a value of another type.
    """
    for key, default in declared.items():
        if not isinstance(key, str) or type(default) not in _PARAMETER_KINDS:
            mend = "write a name, and a text, a number, True or False"
            raise SettingsError(f"model {model}: parameters = {{{key!r}: {default!r}}}: {mend}")
    return {
        key: Parameter(_PARAMETER_KINDS[type(default)], "", str(default)).parse(
            model, key, texts.get(key, "")
        )
        for key, default in declared.items()
    }


def _told(
    raised: BaseException, method: str = "answer", *, is_cancelled: bool = False
) -> BaseException:
    """What the end of a request is told as, or of another method of the pipeline.

    What the caller sent is the caller's mistake, and what an engine or another model failed at is
    an ``EngineError``. All else is a ``Defect`` of the pipeline, a time limit of its own excepted.
    The failures of a task group are told in their own words. ``SystemExit`` and a cancellation of
    the pipeline's own would end the event loop or look like the caller's leaving.
    ``is_cancelled``: the server has cancelled the request.
    """
    inner = []
    for error in getattr(raised, "exceptions", ()):
        inner.append(_told(error, method, is_cancelled=is_cancelled))
    if inner and all(isinstance(error, TrtllmBlsError) for error in inner):
        return _joined(inner)
    if inner:
        return next(error for error in inner if not isinstance(error, TrtllmBlsError))
    if isinstance(raised, EngineRefusal):
        return raised.callers_mistake or Defect(str(raised))
    if type(raised) is TrtllmBlsError:  # a misuse of what the pipeline was given
        return Defect(str(raised))
    if isinstance(raised, asyncio.TimeoutError):
        log.error("a time limit of the pipeline's own is over", exc_info=raised)
        return DeadlineExceeded(f"a time limit in {method} is over; the server's log tells which")
    own_cancel = isinstance(raised, asyncio.CancelledError) and not is_cancelled
    if own_cancel or isinstance(raised, (SystemExit, KeyboardInterrupt)):
        return RuntimeError(f"{method} raised {raised!r}")
    return raised


def _joined(errors: Sequence[BaseException]) -> BaseException:
    """Several failures as one, of the kind that they have in common."""
    texts = dict.fromkeys(str(error) for error in errors)
    if len(texts) == 1:
        return errors[0]
    mistakes = [error for error in errors if isinstance(error, InvalidRequest)]
    if len(mistakes) == len(errors):
        others = [text for text in texts if text != str(mistakes[0])]
        return InvalidRequest(mistakes[0].field, "; ".join([mistakes[0].problem, *others]))
    has_defect = any(isinstance(error, Defect) for error in errors)
    kind = Defect if has_defect else EngineError
    return kind("; ".join(texts))
