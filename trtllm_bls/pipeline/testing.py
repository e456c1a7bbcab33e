"""A fake Triton that runs a model, and reports each breach of Triton's rules.

::

    with serving(TritonPythonModel, llm=["a", "b"]) as model:
        answer = model.ask(prompt="hello").wait()
    assert answer.said("text") == ["a", "b"]

The rules: A request ends in exactly one FINAL. Nothing is sent after it, and an error only with it.
``is_cancelled`` is never called after FINAL. No two sends of one request overlap. Only requested
outputs are sent. A breach raises where it happens. A thread may swallow that exception, so the
breach also stays in ``FakeTriton.broken``, and ``serving`` raises it at its end.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2

from trtllm_bls.engines.content_parts import split_parts
from trtllm_bls.errors import TrtllmBlsError, Unsupported, to_wire
from trtllm_bls.orchestrator.orchestrator import (
    Load,
    Orchestrator,
    TextSink,
    has_expired,
    timeout,
)
from trtllm_bls.pipeline.content_parts import ContentPart
from trtllm_bls.pipeline.language_model import LLM, ConversationOptions
from trtllm_bls.pipeline.other_models import DeclaredModel, OtherModels, failure_of
from trtllm_bls.pipeline.streaming_model import (
    PipelineDeployment,
    PipelineParameters,
    StreamingModel,
    undeclared_parameters,
)
from trtllm_bls.settings.model_config import model_class, written_parameters
from trtllm_bls.text.stopping import StopMatcher
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import Array, Ending, FinishReason, TextChunk, TextRequest, TokenText
from trtllm_bls.wire.call_context import (
    CONTEXT_PARAMETER,
    NO_CONTEXT,
    CallContext,
    context_of,
    signed_context,
)
from trtllm_bls.wire.contract import Tensor as Declared
from trtllm_bls.wire.contract import by_name
from trtllm_bls.wire.grpc_client import GrpcCall, GrpcChannel, GrpcError
from trtllm_bls.wire.kserve import arrays_of, packed_array

FINAL = 1
SECONDS = 20  # a test that waits longer than this has failed


class TritonModelError(Exception):
    """The exception that the real utilities raise from C++."""


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        if array.ndim < 1 or array.dtype.kind == "U":
            raise TritonModelError(f"{name}: {array.dtype} of shape {array.shape}")
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"
    NOT_FOUND = "NOT_FOUND"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    UNSUPPORTED = "UNSUPPORTED"
    CANCELLED = "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code

    def __repr__(self) -> str:
        return f"{self._code}: {self._message}"


class InferenceResponse:
    def __init__(self, tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._tensors = list(tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Ask:
    """A request to a decoupled model, its caller, and the responses that the caller got.

    ``on_send`` is called in the sending thread with each response before it arrives. It may block,
    or raise as Triton does if a send fails.
    """

    def __init__(
        self, triton: FakeTriton, inputs: Mapping[str, Any], outputs: Sequence[str], id: str
    ) -> None:
        self.responses: list[dict[str, Any]] = []
        self.error: TritonError | None = None
        self.sent_parameters: dict[str, Any] = {}
        self.sequence_id: int | str = 0
        self.gone = False
        self.questions = 0  # the model's calls of ``is_cancelled``
        self._triton = triton
        self._inputs = inputs
        self._outputs = outputs
        self._id = id
        self.on_send: Callable[[InferenceResponse | None], object] = bool
        self._closed = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()

    # --- the caller's side ---

    def leave(self) -> None:
        """Make the caller leave, like a cancelled gRPC call or a closed HTTP connection."""
        self.gone = True

    def wait(self, responses: int = 0) -> Ask:
        """Wait until this number of responses came, or by default until FINAL."""
        with self._changed:
            has_come = self._changed.wait_for(
                lambda: self._closed or 0 < responses <= len(self.responses), SECONDS
            )
        assert has_come, f"no answer: {self.responses}"
        return self

    def said(self, output: str) -> list[Any]:
        """Return one output of every response that has it, as lists without the batch dimension.

        Texts have no batch dimension.
        """
        values = []
        for response in self.responses:
            if output in response:
                array = response[output]
                if self._triton.batched and array.ndim > 1:
                    array = array[0]
                values.append(array.tolist())
        return values

    # --- the model's side ---

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self.sent_parameters)

    def correlation_id(self) -> int | str:
        return self.sequence_id

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, _foreign_view(array)) for name, array in self._inputs.items()]

    def requested_output_names(self) -> list[str]:
        return list(self._outputs)

    def get_response_sender(self) -> Ask:
        return self

    def is_cancelled(self) -> bool:
        if self._closed:
            raise self._triton.breach("is_cancelled after FINAL: the server would crash")
        self.questions += 1
        return self.gone

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if not self._sending.acquire(blocking=False):
            raise self._triton.breach("two sends at once")
        try:
            self.on_send(response)
            with self._changed:
                if self._closed:
                    raise self._triton.breach("send after FINAL")
                if response is not None:
                    self._receive(response, flags == FINAL)
                elif flags != FINAL:
                    raise self._triton.breach("an empty send without FINAL")
                self._closed = flags == FINAL
                self._changed.notify_all()
        finally:
            self._sending.release()

    def _receive(self, response: InferenceResponse, final: bool) -> None:
        if response.has_error():
            if not final:
                raise self._triton.breach("an error without FINAL in the same send")
            self.error = response.error()
            return
        arrays = {}
        wide = []
        for tensor in response.output_tensors():
            array = tensor.as_numpy()
            arrays[tensor.name()] = array
            if array.shape[0] != 1:
                wide.append(tensor.name())
        if extra := arrays.keys() - set(self._outputs):
            raise self._triton.breach(f"outputs nobody asked for: {extra}: the stub would crash")
        if wide and self._triton.batched:
            raise self._triton.breach(f"first dimension of a response is not 1: {wide}")
        self.responses.append(arrays)


def _foreign_view(array: Any) -> Any:
    """Return a view that does not own its memory, like the inputs that Triton gives a model."""
    if array.dtype == object or not array.size:
        return array
    return np.frombuffer(memoryview(array), array.dtype).reshape(array.shape)


class FakeTriton:
    """The module ``triton_python_backend_utils``.

    ``batched``: the model's ``max_batch_size`` is not 0, so the first dimension is the batch.
    """

    Tensor = Tensor
    TritonError = TritonError
    InferenceResponse = InferenceResponse

    def __init__(self, batched: bool = True) -> None:
        self.batched = batched
        self.broken: list[str] = []
        self.lines: list[tuple[str, str]] = []
        self.Logger = SimpleNamespace(
            log_info=lambda text: self.lines.append(("info", text)),
            log_warn=lambda text: self.lines.append(("warn", text)),
            log_error=self._log_error,
        )

    def _log_error(self, text: str) -> None:
        self.lines.append(("error", text))
        sys.stderr.write(f"{text}\n")  # pytest shows it if the test fails

    def breach(self, rule: str) -> Exception:
        self.broken.append(rule)
        return TritonModelError(rule)

    def ask(self, inputs: Mapping[str, Any], *outputs: str, id: str = "") -> Ask:
        """Return a request as Triton gives it to a model; see ``Ask``."""
        return Ask(self, inputs, outputs, id)


# --- a pipeline's model, without an engine or other models ----------------------------------

# A language model's answer to one request. A text is a token, an exception a failure, ``None`` a
# wait that only a cancellation ends.
Pieces: TypeAlias = Iterable["str | Exception | None"] | AsyncIterator["str | Exception | None"]
# The pieces of every request, or a list of pieces for one request after another, or a function of
# the request.
Script: TypeAlias = Sequence[Any] | Callable[[TextRequest], Pieces]
Play: TypeAlias = Callable[[Mapping[str, Array]], Any]


class ScriptedLLM(Orchestrator):
    """An orchestrator whose answers are scripted. ``live``: the number of answers that run."""

    def __init__(
        self, script: Script, encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        self._script = script
        self.encode = encode
        self._scripts: Iterator[Any] | None = None  # if the script is a list of one per request
        if not callable(script) and any(isinstance(item, (list, tuple)) for item in script):
            self._scripts = iter(script)
        self.live = 0
        self.requests: list[TextRequest] = []

    def load(self) -> Load:
        return Load(self.live, 0, 0, 0)

    async def run(self, request: TextRequest, sink: TextSink, *_: object) -> None:
        self.requests.append(request)
        if request.wants.log_probs or request.wants.top_log_probs:
            raise Unsupported("log_probs", "a script of a language model has none")
        self.live += 1
        try:
            for index in range(request.num_return_sequences):
                await self._answer(self._pieces(request), request, sink, index)
        finally:
            self.live -= 1

    def _pieces(self, request: TextRequest) -> Any:
        if callable(self._script):
            return self._script(request)
        if self._scripts is None:
            return self._script
        pieces = next(self._scripts, None)
        assert pieces is not None, f"the script of the language model is over: {request}"
        return pieces

    async def _answer(self, pieces: Any, request: TextRequest, sink: TextSink, index: int) -> None:
        ending = Ending(finish_reason=FinishReason.END_ID, prompt_tokens=1, completion_tokens=0)
        stops = StopMatcher(request.stop_words, request.include_stop)
        limit = timeout(request.timeout_s)
        try:
            async with limit:
                async for piece in _items(pieces):
                    if ending.completion_tokens == request.max_tokens:
                        ending.finish_reason = FinishReason.LENGTH
                        break
                    await sink.ready()
                    if piece is None:
                        await asyncio.Event().wait()
                    if isinstance(piece, Exception):
                        raise piece
                    ids: Sequence[int] = [ending.completion_tokens]
                    if self.encode is not None:
                        ids = self.encode(piece)
                    # A text comes with the last of its ids, as from a detokeniser.
                    tokens = [TokenText(token_id, b"", None) for token_id in ids[:-1]]
                    tokens.append(TokenText(ids[-1], piece.encode(), None))
                    cut = stops.feed(piece)
                    sink.send(TextChunk(cut.text, sequence_index=index, tokens=tuple(tokens)))
                    ending.completion_tokens += 1
                    if cut.stop is not None:
                        ending.finish_reason = FinishReason.STOP
                        ending.stop_reason = cut.stop
                        break
        except asyncio.TimeoutError:
            if not has_expired(limit):
                raise
            ending.finish_reason = FinishReason.TIMEOUT
        finally:
            del limit  # it refers to the task, whose error refers to this frame
        tail = ""
        if not ending.stop_reason:
            tail = stops.flush()
        sink.send(TextChunk(tail, sequence_index=index, ending=ending, tokens=()))


async def _items(value: Any) -> AsyncIterator[Any]:
    """Yield the items of a script's or a double's value, which may be asynchronous."""
    if inspect.isawaitable(value):
        value = await value
    if hasattr(value, "__aiter__"):
        async for item in value:
            yield item
        return
    if isinstance(value, Mapping):
        value = [value]
    for item in value:
        await asyncio.sleep(0)
        yield item


@dataclass
class Double:
    """A double of another model. ``play``: a function from its inputs to its outputs.

    ``play`` may be asynchronous. That of a decoupled model returns a list or an async iterator of
    outputs. ``inputs`` and ``outputs`` are declared as in a pipeline, or in the model's ``config``
    file. Without a declaration, types are not checked, and a value has the type that numpy gives
    it. ``rows``: ``max_batch_size`` is not 0.
    """

    play: Play
    inputs: Sequence[Declared] = ()
    outputs: Sequence[Declared] = ()
    config: str | os.PathLike[str] | None = None
    rows: bool = False
    decoupled: bool | None = None  # ``None``: it may be called both ways

    def declaration(self, name: str) -> DeclaredModel:
        """Return the declaration that ``OtherModels`` would fetch from Triton."""
        if self.config is not None:
            text = Path(self.config).read_text(encoding="utf-8")
            config = text_format.Parse(text, model_config_pb2.ModelConfig())
            return replace(DeclaredModel.of(config), name=name)
        return DeclaredModel(
            name,
            by_name(self.inputs),
            by_name(self.outputs),
            self.rows,
            bool(self.decoupled),
            checked=bool(self.inputs or self.outputs),
        )


@dataclass
class Called:
    """A call of another model, as the model gets it.

    ``context``: the context that the call passes on. ``over``: the call has ended or was cancelled.
    """

    model: str
    inputs: Mapping[str, Array]
    id: str
    version: str
    parameters: Mapping[str, Any]
    context: CallContext = NO_CONTEXT
    over: bool = field(default=False, repr=False)


class FakeServer(GrpcChannel):
    """The gRPC port of a server whose models are ``doubles``. ``calls``: all calls so far."""

    def __init__(self, doubles: Mapping[str, Double]) -> None:
        super().__init__("other models of the test:0")
        self.doubles = doubles
        self.calls: list[Called] = []

    def open(self, method: str, on_messages: Any, on_end: Any, *_: Any) -> GrpcCall:
        call = GrpcCall(b"", on_messages, on_end)
        call.connection = _FakeConnection(self, call, method)  # type: ignore[assignment]
        return call

    async def close(self) -> None:
        pass

    async def answers(self, method: str, message: bytes) -> AsyncIterator[Any]:
        """Yield the messages of a call. Raises ``GrpcError``."""
        if method == "ServerReady":
            yield service_pb2.ServerReadyResponse(ready=True)
            return
        request = service_pb2.ModelInferRequest.FromString(message)
        model = self.declaration(request.model_name)
        call = _received_call(request)
        self.calls.append(call)
        double = self.doubles[model.name]
        streams = method == "ModelStreamInfer"
        if double.decoupled and not streams:
            raise GrpcError("UNIMPLEMENTED", "ModelInfer: decoupled transaction policy")
        requested_names = {output.name for output in request.outputs}
        try:
            async for outputs in _items(double.play(call.inputs)):
                response = service_pb2.ModelInferResponse(model_name=model.name, id=request.id)
                for name, value in outputs.items():
                    if not requested_names or name in requested_names:
                        datatype, array = model.typed(name, value, model.outputs)
                        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
                        response.raw_output_contents.append(packed_array(datatype, array))
                if streams:
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)
                else:
                    yield response
        except TrtllmBlsError as error:
            raise GrpcError("INTERNAL", to_wire(error)) from error
        except Exception as error:
            raise GrpcError("INTERNAL", f"{type(error).__name__}: {error}") from error
        finally:
            call.over = True
        if streams:
            final = service_pb2.ModelInferResponse(model_name=model.name, id=request.id)
            final.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=final)

    def declaration(self, name: str) -> DeclaredModel:
        """Return a model's declaration. Raises ``GrpcError``."""
        if name not in self.doubles:
            problem = f"Request for unknown model: '{name}' is not found; name it in ``models``"
            raise GrpcError("NOT_FOUND", problem)
        return self.doubles[name].declaration(name)


def _received_call(request: Any) -> Called:
    """Return the call in a ``ModelInferRequest`` message."""
    parameters = {}
    for name, parameter in request.parameters.items():
        if name != "triton_enable_empty_final_response":
            parameters[name] = getattr(parameter, parameter.WhichOneof("parameter_choice"))
    context = context_of(request.model_name, parameters)
    parameters.pop(CONTEXT_PARAMETER, None)
    return Called(
        request.model_name,
        arrays_of(request.inputs, request.raw_input_contents),
        request.id,
        request.model_version,
        parameters,
        context,
    )


class _FakeConnection:
    """A connection for one call to a ``FakeServer``. Its task plays the model."""

    def __init__(self, server: FakeServer, call: GrpcCall, method: str) -> None:
        self._server = server
        self._call = call
        self._method = method.rpartition("/")[2]
        self._task: asyncio.Task[None] | None = None
        self.protocol = self
        self.calls = {call.stream_id: call}

    def send(self, stream_id: int, message: bytes) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(message))

    def half_close(self, stream_id: int) -> None:
        pass

    def flush_soon(self) -> None:
        pass

    def reset(self, stream_id: int) -> None:
        if self._task is not None:
            self._task.cancel()

    def hold(self, stream_id: int) -> None:
        pass

    release = hold

    async def _run(self, message: bytes) -> None:
        error: GrpcError | None = None
        try:
            async for answer in self._server.answers(self._method, message):
                self._call.replies += 1
                self._call.on_messages([answer.SerializeToString()])
        except GrpcError as raised:
            error = raised
            if self._method == "ModelStreamInfer":  # Triton sends a message, then the status OK
                response = service_pb2.ModelStreamInferResponse(error_message=raised.details)
                self._call.on_messages([response.SerializeToString()])
                error = None
        self._task = None
        self._call.end(error)


class _Models(OtherModels):
    def __init__(self, server: FakeServer) -> None:
        super().__init__(server.target, None)
        self.channel = server
        self._server = server
        self.names = server.doubles

    async def _fetch(self, model: str, version: str) -> DeclaredModel:
        try:
            return self._server.declaration(model)
        except GrpcError as error:
            raise failure_of(model, error) from error


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The client of a request, as the OpenAI API describes it.

    ``models``: the pipelines that made the request on the client's behalf. ``seconds``: the time
    that they have left. The other fields are those of ``ChatRequest``.
    """

    key: str | None = None
    cache_salt: str | None = None
    session: str | None = None
    seconds: float | None = None
    models: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    user: str | None = None
    prompt_cache_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def context(self) -> CallContext:
        """The part that travels in the server's signed parameter."""
        return CallContext(
            key=self.key,
            cache_salt=self.cache_salt,
            session=self.session,
            seconds=self.seconds,
            models=self.models,
        )


_ANONYMOUS = Caller()


class LoadedModel:
    """A model that ``serving`` has loaded.

    ``llm``: its language model. ``llms``: all of them by name. ``calls``: calls of other models.
    """

    def __init__(
        self,
        model: StreamingModel,
        triton: FakeTriton,
        llms: Mapping[str, ScriptedLLM],
        server: FakeServer,
    ) -> None:
        self.model = model
        self.triton = triton
        self.llms = llms
        self.llm = llms[""]
        self.calls = server.calls

    def ask(
        self,
        *,
        outputs: Sequence[str] = (),
        id: str = "",
        caller: Caller = _ANONYMOUS,
        **inputs: Any,
    ) -> Ask:
        """Send a request. ``inputs`` are arrays, numbers, texts or bytes by name. See ``Ask``."""
        input_tensors, output_tensors = self.model.tensors()
        model = DeclaredModel(
            "model", by_name(input_tensors), by_name(output_tensors), self.triton.batched
        )
        arrays = {}
        try:
            for name, _, array in model.arrays(inputs, outputs):
                arrays[name] = array
        except TrtllmBlsError as error:
            raise AssertionError(f"Triton would refuse the request: {error}") from error
        ask = self.triton.ask(arrays, *(outputs or model.outputs), id=id)
        if caller.context != NO_CONTEXT:
            name = self.model.deployment.name
            ask.sent_parameters[CONTEXT_PARAMETER] = signed_context(name, caller.context)
        self.model.execute([ask])
        return ask

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        caller: Caller = _ANONYMOUS,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Answer a conversation with the model's ``chat``, and return the events.

        The content of a message may be a list of texts and ``ContentPart``s. ``options``: those of
        ``LLM.chat``, and the fields that the model declares. Raises ``AssertionError`` with the
        error, if the model answers with one.
        """
        chat_options = {}
        further = {}
        for name, value in options.items():
            if name in ConversationOptions.__annotations__:
                chat_options[name] = value
            else:
                further[name] = value
        wire_messages, parts = split_parts([_wire_message(message) for message in messages])
        request = {
            "messages": wire_messages,
            "tools": tools,
            "options": chat_options,
            "further": further,
            "metadata": caller.metadata,
            "user": caller.user,
            "prompt_cache_key": caller.prompt_cache_key,
            "headers": caller.headers,
        }
        inputs: dict[str, Any] = {"chat_request": json.dumps(request), **parts}
        ask = self.ask(outputs=["chat_events"], caller=caller, **inputs).wait()
        assert ask.error is None, ask.error
        events = []
        for (text,) in ask.said("chat_events"):
            events += json.loads(text)
        return events


def _wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the OpenAI API sends it to a pipeline."""
    content = message.get("content")
    if isinstance(content, list):
        content = [_wire_part(part) for part in content]
    return {**message, "content": content}


def _wire_part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, ContentPart):
        return part.fields
    return part


@contextmanager
def serving(
    model: type[StreamingModel],
    *,
    llm: Script | Mapping[str, Script] = (),
    models: Mapping[str, Play | Double] | None = None,
    decoupled: bool = True,
    rows: bool = False,
    **parameters: object,
) -> Iterator[LoadedModel]:
    """Load ``model`` and serve requests until the end of the block.

    ``llm``: the ``Script`` of the language model, or of several by the names that
    ``deployment.llm`` gets (``""`` without a name). ``models``: other models by name (``Double``).
    ``parameters``: those of the model; with ``tokenizer_dir`` its tokenizer is loaded as in Triton.
    ``rows``: ``max_batch_size`` is 1. Raises ``AssertionError`` at the end if a rule of Triton was
    broken, or an answer or a call of another model still runs.
    """
    triton = FakeTriton(batched=rows)
    scripts: dict[str, Script] = {"": ()}
    if isinstance(llm, Mapping):
        scripts.update(llm)
    else:
        scripts[""] = llm
    llms = {name: ScriptedLLM(script) for name, script in scripts.items()}
    doubles = {}
    for name, double in (models or {}).items():
        if not isinstance(double, Double):
            double = Double(double)
        doubles[name] = double
    server = FakeServer(doubles)

    class LoadedDeployment(PipelineDeployment):
        def __init__(self, parameters: PipelineParameters, pb_utils: Any, model_name: str) -> None:
            super().__init__(parameters, None, model_name)
            self.other_models = _Models(server)

        def llm(
            self,
            name: str = "",
            *,
            tokenizer: str | os.PathLike[str] | None = None,
            tool_parser: str | None = None,
            reasoning_parser: str | None = None,
        ) -> LLM:
            assert name in llms, f"a test without a script for {name}: serving(llm={{{name!r}: …}})"
            chat = self.chat_parameters(tokenizer, tool_parser, reasoning_parser)
            loaded = None
            if chat.tokenizer_dir is not None:
                loaded = load_tokenizer(chat.tokenizer_dir, own_process=False)
                llms[name].encode = partial(loaded.encode, add_special_tokens=False)
            self._orchestrators.append(llms[name])
            return LLM(llms[name], loaded, chat.tool_parser, chat.reasoning_parser)

    problems = list(undeclared_parameters(parameters, model.parameters))
    assert not problems, problems
    if "tokenizer_dir" in parameters:
        parameters["tokenizer_dir"] = os.path.abspath(str(parameters["tokenizer_dir"]))
    config = {
        "name": "model",
        "max_batch_size": int(rows),
        "parameters": written_parameters(parameters),
        "model_transaction_policy": {"decoupled": decoupled},
    }
    served = model()
    served.deployment_type = LoadedDeployment  # type: ignore[misc, assignment]
    arguments = {"model_config": json.dumps(config), "model_name": "model"}
    served.initialize({**arguments, "model_repository": os.getcwd()}, triton)
    try:
        yield LoadedModel(served, triton, llms, server)
    finally:
        served.finalize()
    assert not triton.broken, triton.broken
    running = sum(scripted.live for scripted in llms.values())
    assert not running, f"{running} answers of the language model still run"
    calls = [call for call in server.calls if not call.over]
    assert not calls, f"calls of other models still run: {calls}"


def load(model_file: str | os.PathLike[str]) -> Any:
    """Return the class ``TritonPythonModel`` of a ``model.py``, which may import Triton's own
    utilities."""
    return model_class(model_file)
