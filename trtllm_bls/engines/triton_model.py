"""An engine behind a Triton server's gRPC port: the model ``tensorrt_llm``, C++ backend or not.

Versions of the engine differ, so the declarations of a deployed model are looked up and never
guessed (``DeployedModel``). ``request_inputs`` writes a request's tensors, ``ResponseReader`` reads
those of its responses.

All requests of an engine share one connection; each running one has a ``ModelStreamInfer`` call to
itself. A cancelled call ends its request in Triton, every error is delivered, and no two requests
can disturb each other. A call is never cancelled around its final response, which would leak the
request inside Triton.

Opening a call costs more than a short request does, and speculative decoding makes two requests a
round. So ``StreamPool`` keeps a call whose request has ended for the next one. Requests never
share a call at one time: a cancel ends the whole call, and in Triton 24.10 a request that is
refused on a shared call can end the server. The pool ends an idle call by closing our side of it:
soon, since Triton does not shut down while any call is open, and after many replies, since Triton
24.10 keeps about a kilobyte for each until the call ends.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from trtllm_bls.engines.base import CallChunks, RenewedCapacity, RunningCalls, wire_id
from trtllm_bls.engines.own_port import is_own
from trtllm_bls.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    Unsupported,
    from_wire,
)
from trtllm_bls.settings.cpp_backend import GUIDES
from trtllm_bls.settings.model_config import values_of
from trtllm_bls.settings.parameters import is_true
from trtllm_bls.types import (
    ENGINE_METRICS,
    GUIDE_TEXT_INPUT,
    Array,
    Draft,
    EngineCapacity,
    EngineChunk,
    EngineMetrics,
    EngineRequest,
    PromptIds,
    SpeculationStats,
    TokenIds,
    Wants,
)
from trtllm_bls.wire.contract import ENGINE, by_name
from trtllm_bls.wire.grpc_client import GrpcCall, GrpcChannel, GrpcError, StreamEnd, ignore
from trtllm_bls.wire.kserve import SERVICE, is_final, output_arrays, packed_infer_message
from trtllm_bls.wire.request_fields import input_arrays
from trtllm_bls.wire.words import dense_bias, pack_words

_ID = struct.Struct("<i")
_RAW_OF_4 = b"\x32\x04"  # protobuf's header of raw_output_contents with 4 bytes
_NO_WANTS = Wants()
_DRAFTED = ("total_draft_tokens", "total_accepted_draft_tokens")
# The names of each input, by its key: versions of the engine spell some in other ways.
_SPELLINGS: dict[str, tuple[str, ...]] = {}
for _tensor in ENGINE.inputs:
    _SPELLINGS[_tensor.key] = (*_SPELLINGS.get(_tensor.key, ()), _tensor.name)
_NO_INPUT = "this engine version has no such input"
IDLE_SECONDS = 1.0  # rounds of speculative decoding come back within milliseconds
MAX_IDLE = 64
MAX_REPLIES = 512  # half a megabyte inside Triton 24.10
_IDLE_CLOSE_SECONDS = 1.0  # limit for the server to end its side of idle calls
_CONFIG_SECONDS = 10.0  # limit for the server to send the model's configuration
_LIVE_PROBE_SECONDS = 5.0  # limit for a silent server to answer that it is alive
_REFRESH_SECONDS = 30.0  # age at which the configuration is read again: models are reloaded
_ADVICE = "set engine_url to this server's gRPC port"


class GrpcEngine:
    """The ``tensorrt_llm`` model named ``name`` at ``url`` (host:port).

    ``vocab_size`` is the length of a dense embedding bias. ``stall_seconds``: as in
    ``RunningCalls``. ``own_server``: the address must be that of the server which this process
    belongs to, so another process that listens there is refused.
    """

    def __init__(
        self,
        url: str,
        name: str,
        vocab_size: int,
        stall_seconds: float = 0,
        tls: ssl.SSLContext | None = None,
        own_server: bool = False,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._url = url
        self._own_server = own_server
        self._channel = GrpcChannel(url, tls=tls)
        self.pool = StreamPool(self._channel)
        self._model: DeployedModel | None = None
        self._capacity = RenewedCapacity(self._ask_model, _REFRESH_SECONDS)
        self.capacity = self._capacity.get
        self.calls = RunningCalls(name, stall_seconds, self._problem, self._capacity.doubt)

    def generate(self, request: EngineRequest) -> GrpcChunks:
        """Generate as ``Engine.generate`` does."""
        if self._model is None:
            raise EngineUnavailable(f"{self.name} at {self._url}: not asked for its capacity yet")
        return GrpcChunks(self, request, self._model)

    async def close(self) -> None:
        """Close the connection; running calls end with it."""
        self.calls.close()
        await self.pool.close()
        await self._channel.close()
        await self._capacity.close()

    def failure(self, error: GrpcError) -> EngineError:
        """Return a call's status as an engine's error."""
        details = f"{self.name} at {self._url}: {error.reason}"
        if error.unreachable:
            return EngineUnavailable(details)
        return EngineError(details)

    async def _ask_model(self) -> EngineCapacity:
        request = service_pb2.ModelConfigRequest(name=self.name).SerializeToString()
        if self._own_server and self._model is None and is_own(self._url) is False:
            problem = f"{self.name}: another process than this server listens at {self._url}"
            raise EngineUnavailable(f"{problem}; {_ADVICE}")
        try:
            answer = await self._channel.unary(SERVICE + "ModelConfig", request, _CONFIG_SECONDS)
            config = service_pb2.ModelConfigResponse.FromString(answer).config
        except GrpcError as error:
            failure = self.failure(error)
            if self._own_server and await self._problem() is not None:
                failure = EngineUnavailable(f"{failure}; {_ADVICE}")
            raise failure from error
        except DecodeError as error:
            problem = f"{self.name} at {self._url}: its configuration cannot be read"
            raise EngineError(problem) from error
        self._model = DeployedModel.of(config)
        return self._model.capacity

    async def _problem(self) -> str | None:
        """Return a problem if no Triton answers at the address, whatever its models do."""
        try:
            await self._channel.unary(SERVICE + "ServerLive", b"", _LIVE_PROBE_SECONDS)
        except GrpcError:
            return f"{self.name} at {self._url}: its server does not answer"
        return None


class GrpcChunks(CallChunks):
    """A request over one call of the engine's pool."""

    def __init__(self, engine: GrpcEngine, request: EngineRequest, model: DeployedModel) -> None:
        if not model.decoupled:
            sequences = request.num_return_sequences
            if sequences > 1:
                problem = f"{sequences}; the engine's model is not decoupled and answers once"
                raise Unsupported("num_return_sequences", f"{problem}; send 1")
            request = replace(request, streaming=False)
        self._engine = engine
        self._id = wire_id(request)
        self._reader = ResponseReader(request, model)
        self._message = packed_infer_message(
            engine.name,
            self._id,
            request_inputs(request, model, engine.vocab_size),
            model.outputs_for(request),
            request.traceparent,
        )
        super().__init__(engine.calls, engine.pool.release)
        self._begin()

    def _begin(self) -> None:
        self._call = self._engine.pool.take()
        self._num_old_replies = self._call.replies
        self._call.on_messages = self.on_messages
        self._call.on_end = self.on_end
        self._call.send(self._message)

    def _read(self, messages: list[bytes], chunks: list[EngineChunk]) -> bool:
        for message in messages:
            ids = self._reader.next_id(message)
            if ids is not None:
                chunks.append(EngineChunk(token_ids=ids))
                continue
            reply = service_pb2.ModelStreamInferResponse.FromString(message)
            if reply.error_message:
                # An error may not be the last response, so the call takes no other request.
                self._engine.pool.end(self._call)
                raise from_wire(reply.error_message)
            if reply.infer_response.id != self._id:
                raise EngineError(f"{self._engine.name} answered to another request's id")
            response_chunks, is_last = self._reader.read(reply.infer_response, message)
            chunks += response_chunks
            if is_last:
                return True
        return False

    def on_end(self, error: GrpcError | None) -> None:
        """End as ``ResponseStream`` does."""
        if self._num_old_replies and self._call.replies == self._num_old_replies:
            self._begin()  # an idle call had ended before it took the request: take a new one
        else:
            super().on_end(error)

    def _failure(self, error: GrpcError | None) -> EngineError:
        if error is not None:
            return self._engine.failure(error)
        return EngineError(f"{self._engine.name} ended its stream without a last response")


class StreamPool:
    """The calls of one connection that no request uses at the moment."""

    def __init__(self, channel: GrpcChannel) -> None:
        self._channel = channel
        self._idle: dict[GrpcCall, asyncio.TimerHandle] = {}
        # Done when the server has ended its side of a call that we have closed.
        self._ending: set[asyncio.Future[GrpcError | None]] = set()

    def take(self) -> GrpcCall:
        """Return a call for one request, a new one if none is idle. The latest used goes first,
        so that the others may expire."""
        if not self._idle:
            return self._channel.open(SERVICE + "ModelStreamInfer", ignore, ignore)
        call, expiry = self._idle.popitem()
        expiry.cancel()
        return call

    def release(self, call: GrpcCall, end: StreamEnd) -> None:
        """Keep the call of a stream that had its last response; cancel any other call."""
        if end is not StreamEnd.LAST:
            if not call.half_closed:  # a half-closed call ends by itself
                call.cancel()
            return
        if call.replies >= MAX_REPLIES or len(self._idle) >= MAX_IDLE:
            self.end(call)
            return
        call.on_messages = ignore
        call.on_end = lambda error: self._forget(call)
        loop = asyncio.get_running_loop()
        self._idle[call] = loop.call_later(IDLE_SECONDS, self.end, call)

    def end(self, call: GrpcCall) -> None:
        """Close our side of a call; further messages are dropped."""
        self._forget(call)
        if not call.done:
            ending = asyncio.get_running_loop().create_future()
            ending.add_done_callback(self._ending.discard)
            self._ending.add(ending)
            call.on_messages = ignore
            call.on_end = ending.set_result
            call.half_close()

    async def close(self) -> None:
        """End idle calls, in order; requests end the calls that they use."""
        for call in list(self._idle):
            self.end(call)
        if self._ending:
            await asyncio.wait(self._ending, timeout=_IDLE_CLOSE_SECONDS)

    def _forget(self, call: GrpcCall) -> None:
        expiry = self._idle.pop(call, None)
        if expiry is not None:
            expiry.cancel()


# --- the engine's model ---------------------------------------------------------------------


@dataclass(frozen=True)
class DeployedModel:
    """The inputs (with Triton's data types), outputs and parameters that one model declares."""

    inputs: Mapping[str, str]
    outputs: frozenset[str]
    parameters: Mapping[str, str]
    decoupled: bool  # otherwise it answers each request with one response

    @classmethod
    def of(cls, config: Any) -> DeployedModel:
        """Read Triton's ``ModelConfig`` message."""
        parameters = values_of(config)
        inputs = {}
        for tensor in config.input:
            type_name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
            inputs[tensor.name] = type_name.replace("STRING", "BYTES")
        if is_true(parameters.get("exclude_input_in_output", "")):
            inputs.pop("exclude_input_in_output", None)  # the default makes the input needless
        outputs = frozenset(by_name(config.output))
        return cls(inputs, outputs, parameters, config.model_transaction_policy.decoupled)

    @property
    def is_cpp_backend(self) -> bool:
        """True for TensorRT-LLM's C++ backend, which does not load without this parameter."""
        return "gpt_model_type" in self.parameters

    @cached_property
    def capacity(self) -> EngineCapacity:
        """The engine's capacity, as far as the parameters state it."""
        one_step = self.parameters.get("one_step_requests")
        mode = self.parameters.get("speculative_decoding_mode")
        # The engines of this package's Python model: TensorRT-LLM makes the tokens and takes no
        # drafts.
        is_python = self.parameters.get("engine", "").startswith(("llm_api", "trtllm://"))
        takes_no_drafts = is_python or mode not in (None, "", "draft_tokens_external")
        return EngineCapacity(
            max_sequence_tokens=self._number("max_sequence_tokens") or None,
            max_prompt_tokens=self._number("max_prompt_tokens") or None,
            max_draft_tokens=0 if takes_no_drafts else self._number("max_draft_len"),
            one_step=is_true(one_step) if one_step else None,
            may_be_one_step=self.is_cpp_backend and not one_step and not takes_no_drafts,
            tells_top_log_probs=is_python,
        )

    @cached_property
    def excludes_prompt(self) -> bool:
        """True if answers come without the prompt: always, if the engine can leave it out."""
        by_default = is_true(self.parameters.get("exclude_input_in_output", ""))
        return by_default or "exclude_input_in_output" in self.inputs

    @cached_property
    def speculates(self) -> bool:
        """True if the engine may speculate by itself, and then reports on its drafts."""
        return self.parameters.get("engine") == "llm_api"

    def outputs_for(self, request: EngineRequest) -> list[str]:
        """Return the outputs to request; no other output is sent."""
        wants = request.wants
        names = ["output_ids", "sequence_length"]
        if request.num_return_sequences > 1:
            names.append("sequence_index")
        if wants.log_probs:
            names += ["output_log_probs", "cum_log_probs"]
        if wants.top_log_probs:
            names += ["top_log_prob_ids", "top_log_probs"]
        if wants.context_logits:
            names.append("context_logits")
        if wants.generation_logits:
            names.append("generation_logits")
        if wants.perf_metrics:
            names += ENGINE_METRICS
        elif self.speculates:
            names += _DRAFTED  # sent once, at the end, if the engine speculates by itself
        names.append("cached_tokens")  # sent once, at the beginning, by an engine that knows it
        return [name for name in names if name in self.outputs]

    def _number(self, key: str) -> int | None:
        value = self.parameters.get(key, "")
        return int(value) if value.isdecimal() else None


# --- requests -------------------------------------------------------------------------------


_NO_TYPED_FIELDS = (None, None, None)


def _check_guide(model: DeployedModel) -> None:
    """Raise ``Unsupported`` for a model of the C++ backend that would ignore a guide."""
    missing = []
    for key in GUIDES:
        if not model.parameters.get(key):
            missing.append(key)
    if model.is_cpp_backend and missing:
        problem = f"the engine would ignore it; set its parameter {' and '.join(missing)}"
        raise Unsupported(GUIDE_TEXT_INPUT, problem)


def request_inputs(
    request: EngineRequest, model: DeployedModel, vocab_size: int
) -> list[tuple[str, str, Array]]:
    """Return name, Triton's data type and values of each input of ``model`` for the request.

    ``vocab_size`` is the length of a dense embedding bias. Raises ``InvalidRequest`` for an
    option that this engine has no input for: it is never dropped in silence.
    """
    data_types = model.inputs
    draft = request.draft
    if request.guide is not None:
        _check_guide(model)
    salted = model.speculates and "cache_salt" in data_types
    sequences = request.num_return_sequences
    numbers: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "streaming": request.streaming or None,  # absent means no
        "num_return_sequences": sequences if sequences > 1 else None,
        "end_id": request.end_id,
        "pad_id": request.pad_id,
        **vars(request.sampling),
        "draft_acceptance_threshold": draft.acceptance_threshold if draft is not None else None,
        "input_lengths": len(request.input_ids),
        "exclude_input_in_output": True if "exclude_input_in_output" in data_types else None,
    }
    for name, demand in vars(request.wants).items():
        # Counts are the caller's own business; the engine need not send them.
        if demand and not name.startswith("num_"):
            numbers[f"return_{name}"] = demand
    arrays: dict[str, Array] = {}
    for key, value in numbers.items():
        if value is not None:
            spellings = _SPELLINGS.get(key, (key,))
            for name in spellings:
                if name in data_types:
                    arrays[name] = _one_of(name, value)
                    break
            else:
                raise InvalidRequest(spellings[0], _NO_INPUT)
    arrays["input_ids"] = _ids_row(request.input_ids)
    extras = dict(request.extras)
    if (request.guide, request.adapter, request.cache_salt) != _NO_TYPED_FIELDS:
        extras = {**input_arrays(request, salted=salted), **extras}
    for name, values in extras.items():
        arrays[name] = values[None]
    if request.stop_sequences:
        arrays["stop_words_list"] = pack_words(request.stop_sequences)[None]
    if request.bad_sequences:
        arrays["bad_words_list"] = pack_words(request.bad_sequences)[None]
    if request.embedding_bias:
        arrays["embedding_bias"] = dense_bias(request.embedding_bias, vocab_size)[None]
    if draft is not None:
        arrays |= _draft_arrays(draft, data_types)
    inputs = []
    for name, values in arrays.items():
        if name not in data_types:
            raise InvalidRequest(name, _NO_INPUT)
        inputs.append((name, data_types[name], values))
    return inputs


def _draft_arrays(draft: Draft, data_types: Mapping[str, str]) -> dict[str, Array]:
    arrays = {"draft_input_ids": _ids_row(draft.token_ids)}
    if draft.logits is not None:
        is_half = data_types.get("draft_logits") == "FP16"
        numpy_type = np.float16 if is_half else np.float32
        arrays["draft_logits"] = np.asarray(draft.logits, dtype=numpy_type)[None]
    return arrays


@lru_cache(maxsize=4096)
def _one_of(name: str, value: Any) -> Array:
    """Return a number as ``[1, 1]``; cached, since rounds of speculation send the same numbers."""
    array: Array = np.array([[value]], dtype=ENGINE.input_named[name].numpy_type)
    array.flags.writeable = False
    return array


def _ids_row(ids: PromptIds) -> Array:
    """Return ids as ``[1, N]`` int32.

    An array is not copied. A tuple is packed by ``struct``, three times as fast as by numpy.
    """
    if isinstance(ids, array):
        return np.frombuffer(ids, dtype=np.int32)[None]
    return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), dtype=np.int32)[None]


# --- responses ------------------------------------------------------------------------------


# The errors that broken numbers, types and shapes raise where they are read.
_READ_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, struct.error)


class ResponseReader:
    """The responses of one request, as chunks.

    The wire marks only the end of the whole request; here every sequence gets a last chunk.
    """

    def __init__(self, request: EngineRequest, model: DeployedModel) -> None:
        self._request = request
        self._speculates = model.speculates
        repeats_prompt = not (request.streaming or model.excludes_prompt)
        self._skip = len(request.input_ids) if repeats_prompt else 0
        self._unfinished = set(range(request.num_return_sequences))
        self._single = request.num_return_sequences == 1
        self._plain = self._single and request.wants == _NO_WANTS and not self._skip
        self._ids_at: int | None = None  # index of the ids among two outputs, once it is known
        # The latest message of one id: its bytes in front of the id, those behind it, its length.
        self._prefix = b""
        self._suffix = b""
        self._size = -1
        # By sequence index.
        self._num_log_probs: dict[int, int] = {}
        self._latest_metrics: dict[int, EngineMetrics | None] = {}

    def next_id(self, packed: bytes) -> TokenIds | None:
        """Return the id of a message that equals the latest one but for its id; else ``None``.

        Most messages of a stream differ in nothing else, and to see that costs a fraction of
        parsing one.
        """
        if len(packed) != self._size or not packed.startswith(self._prefix):
            return None
        ids = _ID.unpack_from(packed, len(self._prefix))
        return ids if ids[0] >= 0 and packed.endswith(self._suffix) else None

    def read(self, response: Any, packed: bytes = b"") -> tuple[list[EngineChunk], bool]:
        """Return the chunks of one ``ModelInferResponse``, and true for the request's last.

        ``packed``: the message that it came in, for ``next_id``. Raises ``EngineError`` for a
        response that breaks the contract.
        """
        is_last = is_final(response)
        ids = self._plain_ids(response, is_last) if self._plain else None
        if ids is not None:
            if is_last or not self._request.streaming:
                self._unfinished.clear()
                return [EngineChunk(token_ids=ids, final=True)], is_last
            if len(ids) == 1:
                end = b"".join([_RAW_OF_4 + raw for raw in response.raw_output_contents])
                self._size = len(packed) if len(end) == 12 and packed.endswith(end) else -1
                place = len(packed) - (4 if self._ids_at else 10)
                self._prefix = packed[:place]
                self._suffix = packed[place + 4 :]
            return [EngineChunk(token_ids=ids)], False
        try:
            arrays = output_arrays(response)
        except _READ_ERRORS as error:
            raise EngineError(f"the engine's response cannot be read: {error}") from error
        return list(self.chunks(arrays, is_last)), is_last

    def chunks(self, arrays: Mapping[str, Array], is_last: bool) -> Iterator[EngineChunk]:
        """Yield the chunks of one response; after the last, those that end each open sequence."""
        if arrays:
            try:
                chunk = self._chunk(arrays, final=is_last and self._single)
            except _READ_ERRORS as error:
                raise EngineError(f"the engine's response cannot be read: {error}") from error
            if chunk.final:
                self._unfinished.discard(chunk.sequence_index)
            self._latest_metrics[chunk.sequence_index] = chunk.metrics
            yield chunk
        if is_last:
            for index in sorted(self._unfinished):  # the engine has not ended them by itself
                metrics = self._latest_metrics.get(index)
                yield EngineChunk(token_ids=(), sequence_index=index, final=True, metrics=metrics)
            self._unfinished.clear()

    def _plain_ids(self, response: Any, is_last: bool) -> TokenIds | None:
        """Return the ids of a response with nothing but ids and their number, as most have.

        ``None`` for any other, which is read with more care. Headers are slow to read, so those of
        the first response hold until the last, as long as the number of outputs stays.
        """
        raws = response.raw_output_contents
        if len(raws) != 2 or len(response.outputs) != 2:
            self._ids_at = None
            return None
        if is_last or self._ids_at is None:
            headers = [output.SerializeToString() for output in response.outputs]
            self._ids_at = _place_of_ids(*headers, len(raws[0]), len(raws[1]))
            if self._ids_at is None:
                return None
        ids = raws[self._ids_at]
        length = raws[1 - self._ids_at]
        count = int.from_bytes(length, "little", signed=True)
        if len(length) != 4 or not 0 <= 4 * count <= len(ids):
            return None
        tokens = struct.unpack_from(f"<{count}i", ids)
        return tokens if min(tokens, default=0) >= 0 else None

    def _chunk(self, arrays: Mapping[str, Array], final: bool) -> EngineChunk:
        length = _number(arrays, "sequence_length")
        if "output_ids" not in arrays or length is None:
            raise EngineError("the engine's response lacks output_ids or sequence_length")
        ids = _ranked(arrays, "output_ids", 3, kinds="iu")
        capacity = ids.shape[2]
        if not 0 <= length <= capacity:
            problem = f"sequence_length is {length}, its output_ids hold {capacity}"
            raise EngineError(f"the engine's {problem}")
        row = ids[0, 0, self._skip : length]
        lowest = row.min(initial=0)
        if lowest < 0:
            raise EngineError(f"the engine's output_ids hold {lowest}, which is no token")
        wants = self._request.wants
        metrics: EngineMetrics | None = None
        if wants.perf_metrics and not arrays.keys().isdisjoint(ENGINE_METRICS):
            metrics = EngineMetrics(**{name: _number(arrays, name) for name in ENGINE_METRICS})
        # The figures of the engine's own speculation; ours is counted round by round.
        speculation: SpeculationStats | None = None
        num_drafted = _number(arrays, "total_draft_tokens")
        num_accepted = _number(arrays, "total_accepted_draft_tokens") or 0
        if num_drafted and self._speculates:
            speculation = SpeculationStats(drafted=num_drafted, accepted=num_accepted)
        index = _number(arrays, "sequence_index") or 0
        if not 0 <= index < self._request.num_return_sequences:
            raise EngineError(f"the engine's response is of sequence_index {index}: none such")
        return EngineChunk(
            token_ids=tuple(row.tolist()),
            sequence_index=index,
            final=final or not self._request.streaming,
            metrics=metrics,
            speculation=speculation,
            cached_tokens=_number(arrays, "cached_tokens"),
            **self._scores(arrays, index, len(row)),
        )

    def _scores(self, arrays: Mapping[str, Array], index: int, num_new: int) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        wants = self._request.wants
        if wants.log_probs and "output_log_probs" in arrays:
            # The engine repeats those of all tokens so far.
            log_probs = _ranked(arrays, "output_log_probs", 3)[0, 0]
            num_read = self._num_log_probs.get(index, 0)
            self._num_log_probs[index] = num_read + num_new
            new = _first("output_log_probs", log_probs[num_read:], num_new)
            scores["log_probs"] = tuple(new.tolist())
        if wants.log_probs and "cum_log_probs" in arrays:
            scores["cum_log_prob"] = float(np.asarray(arrays["cum_log_probs"]).reshape(-1)[0])
        if wants.top_log_probs and "top_log_probs" in arrays:
            values = _first("top_log_probs", _ranked(arrays, "top_log_probs", 3)[0], num_new)
            ids = _ranked(arrays, "top_log_prob_ids", 3, kinds="iu")[0]
            places = []
            for place in zip(ids.tolist(), values.tolist(), strict=True):
                places.append(tuple(zip(*place, strict=True)))
            scores["top_log_probs"] = tuple(places)
        if wants.context_logits and "context_logits" in arrays:
            scores["context_logits"] = np.array(_ranked(arrays, "context_logits", 3)[0])
        if wants.generation_logits and "generation_logits" in arrays:
            rows = np.array(_ranked(arrays, "generation_logits", 4))
            rows = rows[0, :, 0] if self._request.streaming else rows[0, 0]
            scores["generation_logits"] = _first("generation_logits", rows, num_new)
        return scores


@lru_cache(maxsize=256)
def _place_of_ids(left: bytes, right: bytes, *sizes: int) -> int | None:
    """Return the index of the ids among two packed outputs of ``sizes`` bytes.

    ``None`` unless the other output is their number, and both are well formed. Cached, since an
    engine's responses differ in little but their ids.
    """
    read = service_pb2.ModelInferResponse.InferOutputTensor.FromString
    outputs = [read(left), read(right)]
    names: list[str] = []
    for output in outputs:
        if output.datatype != "INT32":
            return None
        names.append(output.name)
    if sorted(names) != ["output_ids", "sequence_length"]:
        return None
    place = names.index("output_ids")
    if [*outputs[place].shape] != [1, 1, sizes[place] / 4]:
        return None
    return place if set(outputs[1 - place].shape) <= {1} else None


def _ranked(arrays: Mapping[str, Array], name: str, rank: int, kinds: str = "f") -> Array:
    array = np.asarray(arrays[name])
    if array.ndim != rank or array.dtype.kind not in kinds:
        raise EngineError(
            f"the engine's {name} are {array.dtype} of shape {list(array.shape)}; "
            f"{rank} dimensions of {'integers' if kinds == 'iu' else 'floats'} are expected"
        )
    return array


def _first(name: str, scores: Array, count: int) -> Array:
    if len(scores) < count:
        raise EngineError(f"the engine's {name} hold {len(scores)} entries for {count} tokens")
    return scores[:count]


def _number(arrays: Mapping[str, Array], name: str) -> int | None:
    return int(np.asarray(arrays[name]).reshape(-1)[0]) if name in arrays else None
