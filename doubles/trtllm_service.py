"""A server that plays TrtllmService over any ``Engine``: for tests and benchmarks.

    python benchmarks/scripted/trtllm_service.py --model-dir DIR --port 50051 --step-ms 5

says each prompt back. It behaves as the real service does as far as its protocol and source tell,
awkward sides included: the end id is a token of the answer, ``complete`` repeats everything, stops
are cut off unless asked to stay, a cancelled call may leave its work running. ``Behaviour`` chooses
what differs between releases and what goes wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import numpy as np

from doubles.generated import GeneratedChunks
from doubles.guided import GuidedAnswers
from doubles.scripted import Fault, Script, ScriptedEngine
from doubles.scripted_tokens import reciting
from trtllm_bls.engines.base import ChunkStream, Engine
from trtllm_bls.engines.trtllm_fields import GUIDE_TYPES, guide_text
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.errors import EngineError, EngineUnavailable, TrtllmBlsError
from trtllm_bls.types import (
    Array,
    EngineCapacity,
    EngineChunk,
    EngineRequest,
    FinishReason,
    Guide,
    PromptIds,
    Sampling,
    TokenIds,
    Wants,
)

_MESSAGE_BYTES = 32 << 20  # either way, as the real server allows
_SERVICE = messages.SERVICE.strip("/")


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What kind of server it plays. ``eos_id``: where answers end that do not ignore it.

    ``stop_ids`` makes ids of a stop string, as the real server does, alone. ``max_seq_len`` 0
    plays a server that was started without one. ``num_reasons``: of several sequences so many are
    told why they ended. ``silent_abort``: an aborted stream just stops. ``leaks``: of calls that
    are cancelled without an Abort every second one runs on. ``breaks_off``: no ``complete``.
    ``unreadable``: the unary method whose answers are bytes that are no message. ``speculates``:
    how many drafted tokens it tells, half of them accepted, as from proto 0.4.19 on.
    """

    model_id: str = "tensorrt-llm"
    version: str = "1.3.0rc29"
    eos_id: int = 2
    vocab_size: int = 1000
    max_seq_len: int = 0
    ids_per_chunk: int = 1
    health: str = "OK"
    num_reasons: int | None = None
    extra_log_prob: bool = False
    silent_abort: bool = False
    leaks: bool = True
    breaks_off: bool = False
    unreadable: str = ""
    speculates: int = 0
    stop_ids: Callable[[str], TokenIds] | None = None


class Refused(Exception):
    """A request that ends with a status before it begins."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status, self.details = status, details


class ScriptedService:
    """The service over ``engine``; ``behaviour`` may be changed while it runs.

    For tests: ``requests`` are the ``GenerateRequest`` messages, ``traces`` the trace contexts that
    came with them, ``aborted`` the ids that were aborted while they ran, ``live`` how many run now,
    ``tokens`` how many ids were made, ``health_checks`` how often it was asked for its health.
    """

    def __init__(self, engine: Engine, behaviour: Behaviour | None = None) -> None:
        self.engine = engine
        self.behaviour = behaviour or Behaviour()
        self.requests: list[Any] = []
        self.traces: list[str | None] = []
        self.aborted: list[str] = []
        self.live = 0
        self.tokens = 0
        self.health_checks = 0
        self._answers: dict[str, _Answer] = {}
        self._cancelled = 0
        self._server: Any = None

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Listen; the port."""
        sizes = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
        self._server = grpc.aio.server(options=[(size, _MESSAGE_BYTES) for size in sizes])
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            name: unary(
                handler, messages.MESSAGES[f"{name}Request"].FromString, partial(self._packed, name)
            )
            for name, handler in (
                ("Abort", self._abort),
                ("HealthCheck", self._health_check),
                ("GetModelInfo", self._model_info),
                ("GetServerInfo", self._server_info),
            )
        }
        handlers["Generate"] = stream(
            self._generate, messages.GenerateRequest.FromString, _serialized
        )
        generic = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        bound: int = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return bound

    async def stop(self, grace: float | None = None) -> None:
        """End what runs and listen no longer."""
        await self._server.stop(grace)
        for answer in list(self._answers.values()):
            answer.stop()

    async def wait(self) -> None:
        """Return once it has been stopped."""
        await self._server.wait_for_termination()

    def _packed(self, method: str, message: Any) -> bytes:
        return b"\xff" if self.behaviour.unreadable == method else _serialized(message)

    async def _generate(self, message: Any, context: Any) -> AsyncGenerator[Any, None]:
        self.requests.append(message)
        self.traces.append(dict(context.invocation_metadata()).get("traceparent"))
        try:
            request = engine_request(message, self.behaviour)
        except Refused as error:
            await context.abort(error.status, error.details)
        answer = _Answer(self, message, request)
        self._answers[message.request_id] = answer  # a second of one id replaces the first
        try:
            async for response in answer.responses():
                yield response
        except TrtllmBlsError as error:
            down = isinstance(error, EngineUnavailable)
            status = grpc.StatusCode.UNAVAILABLE if down else grpc.StatusCode.INTERNAL
            await context.abort(status, str(error))
        finally:
            self._leave(answer)

    def _leave(self, answer: _Answer) -> None:
        if answer.running:
            self._cancelled += 1
            if not self.behaviour.leaks or self._cancelled % 2 == 0:
                answer.stop()
        if self._answers.get(answer.request_id) is answer:
            del self._answers[answer.request_id]

    async def _abort(self, message: Any, context: Any) -> Any:
        answer = self._answers.get(message.request_id)
        if answer is None:
            return messages.AbortResponse(success=False, message="no such request")
        if answer.running:
            self.aborted.append(message.request_id)
            answer.stop()
        return messages.AbortResponse(success=True)

    async def _health_check(self, message: Any, context: Any) -> Any:
        self.health_checks += 1
        return messages.HealthCheckResponse(status=self.behaviour.health)

    async def _model_info(self, message: Any, context: Any) -> Any:
        shown = self.behaviour
        return messages.GetModelInfoResponse(
            model_id=shown.model_id,
            max_input_len=1024,
            max_seq_len=shown.max_seq_len or 1024,
            vocab_size=shown.vocab_size,
        )

    async def _server_info(self, message: Any, context: Any) -> Any:
        return messages.GetServerInfoResponse(
            version=self.behaviour.version,
            backend="pytorch",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            world_size=1,
        )


class _Answer:
    """One request; the engine runs in a task of its own, which a cancelled call may leave."""

    def __init__(self, service: ScriptedService, message: Any, request: EngineRequest) -> None:
        self.request_id: str = message.request_id
        self._service = service
        self._behaviour = service.behaviour
        self._message = message
        self._request = request
        self._sequences = [
            _Sequence(request, message, self._behaviour)
            for _ in range(request.num_return_sequences)
        ]
        self._queue: asyncio.Queue[EngineChunk | Exception | None] = asyncio.Queue()
        self._cached_tokens = 0
        service.live += 1
        self._task = asyncio.create_task(self._run())
        # A task that is cancelled before its first step runs no `finally` of its own.
        self._task.add_done_callback(self._ended)

    @property
    def running(self) -> bool:
        return not self._task.done()

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._service.engine.capacity()
            async with aclosing(self._service.engine.generate(self._request)) as stream:
                async for chunk in stream:
                    self._service.tokens += len(chunk.token_ids)
                    self._queue.put_nowait(chunk)
        except Exception as error:
            self._queue.put_nowait(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._queue.put_nowait(None)
        self._service.live -= 1

    async def responses(self) -> AsyncGenerator[Any, None]:
        while (chunk := await self._queue.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            self._cached_tokens = self._cached_tokens or chunk.cached_tokens or 0
            sequence = self._sequences[chunk.sequence_index]
            pending = sequence.take(chunk)
            if self._message.streaming:
                for part in pending:
                    yield self._response(chunk=self._chunk(chunk.sequence_index, part))
        if (
            not all(sequence.reason for sequence in self._sequences)
            and self._behaviour.silent_abort
        ):
            await asyncio.get_running_loop().create_future()
        if not self._behaviour.breaks_off:
            for index in range(len(self._sequences)):
                yield self._response(complete=self._complete(index))

    def _response(self, **part: Any) -> Any:
        return messages.GenerateResponse(request_id=self.request_id, **part)

    def _chunk(self, index: int, part: tuple[int, int]) -> Any:
        sequence = self._sequences[index]
        begin, end = part
        return messages.MESSAGES["GenerateStreamChunk"](
            token_ids=sequence.ids[begin:end],
            sequence_index=index,
            prompt_tokens=len(self._request.input_ids),
            completion_tokens=end,
            cached_tokens=self._cached_tokens,
            logprobs=self._log_probs(sequence, begin, end),
        )

    def _complete(self, index: int) -> Any:
        sequence = self._sequences[index]
        told = self._behaviour.num_reasons is None or index < self._behaviour.num_reasons
        kept = len(sequence.ids) - sequence.cut
        scored = len(sequence.ids) if self._behaviour.extra_log_prob else kept
        complete = messages.MESSAGES["GenerateComplete"](
            output_token_ids=sequence.ids[:kept],
            sequence_index=index,
            finish_reason=(sequence.reason or "cancelled") if told else "",
            prompt_tokens=len(self._request.input_ids),
            completion_tokens=kept,
            cached_tokens=self._cached_tokens,
            logprobs=self._log_probs(sequence, 0, scored),
            spec_draft_tokens=self._behaviour.speculates,
            spec_accepted_tokens=self._behaviour.speculates // 2,
        )
        if sequence.matched is not None:
            complete.matched_token_id = sequence.matched
        elif sequence.matched_text is not None:
            complete.matched_stop_str = sequence.matched_text
        return complete

    def _log_probs(self, sequence: _Sequence, begin: int, end: int) -> list[Any]:
        count = self._message.output_config.logprobs
        if not count:
            return []
        make, top = messages.MESSAGES["TokenLogprob"], messages.MESSAGES["TopLogprob"]
        found = []
        for place in range(begin, end):
            token, value = sequence.ids[place], sequence.log_probs[place]
            # The likeliest, and the chosen one if it is another.
            listed = {**dict(sequence.best(place, count)), token: value}
            others = [top(token_id=other, logprob=score) for other, score in listed.items()]
            found.append(make(token_id=token, logprob=value, top_logprobs=others))
        return found


class _Sequence:
    """What one sequence has come to: all ids made, how many of the last are cut off, and why."""

    def __init__(self, request: EngineRequest, message: Any, behaviour: Behaviour) -> None:
        self._request, self._message, self._behaviour = request, message, behaviour
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self._logits: list[Array] = []
        self.cut = 0
        self.reason = ""
        self.matched: int | None = None
        self.matched_text: str | None = None
        self._told = 0

    def take(self, chunk: EngineChunk) -> list[tuple[int, int]]:
        """The places of ids that are to be streamed, one pair of bounds per chunk."""
        self.ids += chunk.token_ids
        self.log_probs += chunk.log_probs or [0.0] * len(chunk.token_ids)
        self._logits += [] if chunk.generation_logits is None else list(chunk.generation_logits)
        if chunk.final:
            self._end(chunk.finish_reason)
        most, end = self._behaviour.ids_per_chunk, max(self._told, len(self.ids) - self.cut)
        parts = []
        while end - self._told >= most or (chunk.final and end > self._told):
            upto = min(end, self._told + most)
            parts.append((self._told, upto))
            self._told = upto
        return parts

    def best(self, place: int, count: int) -> list[tuple[int, float]]:
        """The likeliest ids of a place, where the engine was asked for its logits."""
        if place >= len(self._logits):
            return []
        row = self._logits[place].astype(np.float64)
        scores = row - row.max()
        scores -= np.log(np.exp(scores).sum())
        return [(int(token), float(scores[token])) for token in np.argsort(-scores)[:count]]

    def _end(self, reason: FinishReason | None) -> None:
        if reason is FinishReason.END_ID:
            self.reason = "stop"
            self.ids.append(self._behaviour.eos_id)
            self.log_probs.append(0.0)
        elif len(self.ids) >= self._request.max_tokens or reason is not FinishReason.STOP:
            self.reason = "length"
        else:
            self.reason = "stop"
            self._match()
            self.cut *= not self._message.include_stop_token_in_output

    def _match(self) -> None:
        if self.ids[-1] in self._message.stop_token_ids:
            self.matched, self.cut = self.ids[-1], 1
            return
        for text in self._message.stop:
            ids = _stop_ids(self._behaviour, text)
            if ids and tuple(self.ids[-len(ids) :]) == ids:
                self.matched_text, self.cut = text, len(ids)
                return


def engine_request(message: Any, behaviour: Behaviour) -> EngineRequest:
    """A service request as one of ours; its defaults are the service's. Raises ``Refused``."""
    _check(message, behaviour)
    config = message.sampling_config
    given = {
        field.name: value
        for field, value in config.ListFields()
        if field.name not in ("beam_width", "num_return_sequences", "top_p_reset_ids")
    }
    given["early_stopping"] = None
    # What says nothing samples, from everything.
    given.setdefault("top_p", 1.0)
    stops: list[TokenIds] = []
    if not message.ignore_eos:
        stops = [(token,) for token in message.stop_token_ids]
        stops += filter(None, (_stop_ids(behaviour, text) for text in message.stop))
    return EngineRequest(
        request_id=message.request_id,
        input_ids=tuple(message.tokenized.input_token_ids),
        max_tokens=message.max_tokens,
        sampling=Sampling(**given),
        num_return_sequences=config.num_return_sequences or 1,
        end_id=-1 if message.ignore_eos else behaviour.eos_id,
        stop_sequences=tuple(stops),
        guide=_guide(message.guided_decoding),
        bad_sequences=tuple((token,) for token in message.bad_token_ids),
        embedding_bias=tuple(enumerate(message.embedding_bias)),
        wants=Wants(
            log_probs=bool(message.output_config.logprobs),
            generation_logits=message.output_config.logprobs > 1,
        ),
    )


def _guide(guided: Any) -> Guide | None:
    """Read the guide. As the real service does, ignore one without a text."""
    return Guide(GUIDE_TYPES[guided.guide_type - 1], guided.guide) if guided.guide else None


def _check(message: Any, behaviour: Behaviour) -> None:
    """What the service says of a request that is wrong."""
    config = message.sampling_config
    greedy = (config.HasField("top_k") and config.top_k == 1) or any(
        config.HasField(name) and getattr(config, name) == 0 for name in ("temperature", "top_p")
    )
    longest = behaviour.max_seq_len
    tokens = len(message.tokenized.input_token_ids)
    for wrong, details in (
        (not message.HasField("tokenized"), "Request must have tokenized input"),
        (not 0 <= config.top_p <= 1, f"require 0 <= top_p <= 1, got top_p={config.top_p}"),
        (config.top_k < 0, f"require top_k >= 0, got top_k={config.top_k}"),
        (config.temperature < 0, f"require temperature >= 0, got {config.temperature}"),
        (greedy and config.num_return_sequences > 1, "greedy decoding gives one sequence"),
        (
            message.embedding_bias and len(message.embedding_bias) != behaviour.vocab_size,
            "embedding_bias must have vocab_size values",
        ),
    ):
        if wrong:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, details)
    if longest and tokens >= longest:
        details = (
            f"This model's maximum context length is {longest} tokens, the prompt has {tokens}"
        )
        raise Refused(grpc.StatusCode.INTERNAL, details)
    if message.lora_config.task_id:
        details = f"no LoRA adapter {message.lora_config.task_id}"
        raise Refused(grpc.StatusCode.INTERNAL, details)
    if not message.max_tokens:
        raise Refused(grpc.StatusCode.INTERNAL, "max_tokens must be greater than 0")


def _stop_ids(behaviour: Behaviour, text: str) -> TokenIds:
    return behaviour.stop_ids(text) if behaviour.stop_ids else ()


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class EchoEngine:
    """An engine that says each prompt back, or a text of the guide that the request brings.

    ``faults``: what goes wrong, by the request's seed. Without ``guided`` it refuses guides, as a
    server without ``guided_decoding_backend`` does.
    """

    name = "echo"

    def __init__(
        self,
        script: Script,
        faults: dict[int, Fault] | None = None,
        guided: GuidedAnswers | None = None,
    ) -> None:
        self._script = script
        self._faults = faults or {}
        self._guided = guided

    async def capacity(self) -> EngineCapacity:
        return EngineCapacity(max_sequence_tokens=self._script.max_sequence_tokens)

    def generate(self, request: EngineRequest) -> ChunkStream:
        """See ``Engine.generate``."""
        return GeneratedChunks(self._chunks(request))

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        end = max(request.end_id or 0, 0)
        rule = reciting(self._answer(request), len(request.input_ids), then=end)
        engine = ScriptedEngine(rule, self._script)
        engine.fault = self._faults.get(request.sampling.seed or 0)
        async with aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _answer(self, request: EngineRequest) -> PromptIds:
        guide = request.guide
        if guide is None:
            return request.input_ids
        if self._guided is None:
            raise EngineError("Guided decoding is not enabled")
        try:
            return self._guided.answer(guide.kind, guide_text(guide), request.max_tokens)
        except ValueError as error:
            raise EngineError(f"Grammar error: {error}") from error

    async def close(self) -> None:
        pass
