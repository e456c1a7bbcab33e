"""Runs a model without Triton: the fake keeps the rules that the real Triton punishes.

::

    with serving(TritonPythonModel, llm=["a", "b"]) as model:
        answer = model.ask(prompt="hello").wait()
    assert answer.said("text") == ["a", "b"]

A request ends in exactly one FINAL; nothing is sent after it, and an error only with it; a closed
sender is never asked whether its caller has gone; no two sends of one request overlap; only
requested outputs are sent. A breach raises where it happens and is kept in ``FakeTriton.broken``,
since a thread may swallow what is raised in it; ``serving`` raises it at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from trtllm_bls.admission import Admission
from trtllm_bls.engines.triton.grpc import OtherModels, as_array
from trtllm_bls.errors import EngineError
from trtllm_bls.orchestrator import Defaults, Load, Orchestrator, TextSink
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.pipeline import PipelineDeployment, StreamingModel
from trtllm_bls.services.request_reports import RequestLog, RequestMetrics, RequestReports
from trtllm_bls.types import Ending, FinishReason, TextChunk, TextRequest, TokenText

FINAL = 1
SECONDS = 20  # a test that waits longer than this has failed


class TritonModelError(Exception):
    """What the real utilities raise from C++."""


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        if array.ndim < 1 or array.dtype.kind == "U":
            raise TritonModelError(f"{name}: {array.dtype} of shape {array.shape}")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG"
    UNAVAILABLE, UNSUPPORTED, CANCELLED = "UNAVAILABLE", "UNSUPPORTED", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code

    def __repr__(self) -> str:
        return f"{self._code}: {self._message}"


class InferenceResponse:
    def __init__(self, tensors: Sequence[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = list(tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class Ask:
    """One request to a decoupled model, its caller, and everything the caller got.

    ``on_send`` is called in the sending thread with each response before it arrives: it may block,
    or raise as Triton does where a send fails.
    """

    def __init__(
        self, triton: FakeTriton, inputs: Mapping[str, Any], outputs: Sequence[str], id: str
    ) -> None:
        self.responses: list[dict[str, Any]] = []
        self.error: TritonError | None = None
        self.sent_parameters: dict[str, Any] = {}
        self.gone = False
        self.questions = 0  # how often the model has asked whether the caller is gone
        self._triton, self._inputs, self._outputs, self._id = triton, inputs, outputs, id
        self.on_send: Callable[[InferenceResponse | None], object] = bool
        self._closed = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()

    # --- what the caller does and sees ---

    def leave(self) -> None:
        """The caller goes away, as a cancelled gRPC call or a closed HTTP connection does."""
        self.gone = True

    def wait(self, responses: int = 0) -> Ask:
        """Until so many responses came, or by default until FINAL."""
        with self._changed:
            enough = self._changed.wait_for(
                lambda: self._closed or 0 < responses <= len(self.responses), SECONDS
            )
        assert enough, f"no answer: {self.responses}"
        return self

    def said(self, output: str) -> list[Any]:
        """One output of every response that has it, as plain lists without the batch dimension.

        Texts have none.
        """
        found = [response[output] for response in self.responses if output in response]
        return [array[0].tolist() if array.ndim > 1 else array.tolist() for array in found]

    # --- what the model sees ---

    def request_id(self) -> str:
        return self._id

    def parameters(self) -> str:
        return json.dumps(self.sent_parameters)

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, _lent(array)) for name, array in self._inputs.items()]

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
                    self._take(response, flags == FINAL)
                elif flags != FINAL:
                    raise self._triton.breach("an empty send without FINAL")
                self._closed = flags == FINAL
                self._changed.notify_all()
        finally:
            self._sending.release()

    def _take(self, response: InferenceResponse, final: bool) -> None:
        if response.has_error():
            if not final:
                raise self._triton.breach("an error without FINAL in the same send")
            self.error = response.error()
            return
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if more := arrays.keys() - set(self._outputs):
            raise self._triton.breach(f"outputs nobody asked for: {more}: the stub would crash")
        wide = [name for name, array in arrays.items() if array.shape[0] != 1]
        if wide and self._triton.batched:
            raise self._triton.breach(f"first dimension of a response is not 1: {wide}")
        self.responses.append(arrays)


def _lent(array: Any) -> Any:
    """An array over memory that stays the lender's, as far as an array tells that."""
    if array.dtype == object or not array.size:
        return array
    return np.frombuffer(memoryview(array), array.dtype).reshape(array.shape)


class FakeTriton:
    """The module ``triton_python_backend_utils``.

    ``batched``: the model's ``max_batch_size`` is not 0, so the first dimension is the batch.
    """

    Tensor, TritonError, InferenceResponse = Tensor, TritonError, InferenceResponse

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
        sys.stderr.write(f"{text}\n")  # which a test shows when it fails

    def breach(self, rule: str) -> Exception:
        self.broken.append(rule)
        return TritonModelError(rule)

    def ask(self, inputs: Mapping[str, Any], *outputs: str, id: str = "") -> Ask:
        """A request as Triton hands it to a model; see ``Ask``."""
        return Ask(self, inputs, outputs, id)


# --- a pipeline's model, without an engine or other models ----------------------------------

Play = Callable[[Mapping[str, Any]], Any]


class LoadedModel:
    """A model that ``serving`` has loaded."""

    def __init__(self, model: StreamingModel, triton: FakeTriton, llm: ScriptedLLM) -> None:
        self.model, self.triton, self.llm = model, triton, llm

    def ask(self, *, outputs: Sequence[str] = (), id: str = "", **inputs: Any) -> Ask:
        """Send a request; ``inputs`` are arrays, numbers or texts by name. See ``Ask``."""
        declared = [tensor.name for tensor in self.model.outputs]
        required = {tensor.name for tensor in self.model.inputs if tensor.required}
        known = {tensor.name for tensor in self.model.inputs}
        wrong = sorted((required - inputs.keys()) | (inputs.keys() - known))
        assert not wrong, f"Triton would refuse the request: {wrong} missing or not declared"
        arrays = {name: as_array(name, value) for name, value in inputs.items()}
        ask = self.triton.ask(arrays, *(outputs or declared), id=id)
        self.model.execute([ask])
        return ask


class ScriptedLLM(Orchestrator):
    """Plays an orchestrator whose every answer is ``pieces``: a text is a token, an exception a
    failure, ``None`` a wait that only a cancellation ends. ``live``: answers that run;
    ``requests``: all so far."""

    def __init__(self, pieces: Sequence[str | Exception | None]) -> None:
        self._pieces = pieces
        self.live = 0
        self.requests: list[TextRequest] = []

    def load(self) -> Load:
        return Load(self.live, 0, 0, 0)

    async def run(self, request: TextRequest, sink: TextSink, *_: object) -> None:
        self.requests.append(request)
        self.live += 1
        try:
            pieces, reason = self._pieces, FinishReason.END_ID
            if request.max_tokens is not None and len(pieces) > request.max_tokens:
                pieces, reason = pieces[: request.max_tokens], FinishReason.LENGTH
            for number, piece in enumerate(pieces):
                await sink.ready()
                if piece is None:
                    await asyncio.Event().wait()
                if isinstance(piece, Exception):
                    raise piece
                text = str(piece)
                token = TokenText(number, text.encode(), None)
                sink.send(TextChunk(text, tokens=(token,)))
            ending = Ending(finish_reason=reason, prompt_tokens=1, completion_tokens=len(pieces))
            sink.send(TextChunk("", ending=ending, tokens=()))
        finally:
            self.live -= 1


class _Models(OtherModels):
    def __init__(self, play: Mapping[str, Play]) -> None:
        self._play = play

    async def infer(self, model: str, inputs: Any, outputs: Any, request_id: str) -> Any:
        if model not in self._play:
            raise EngineError(f"{model}: Request for unknown model; name it in ``models``")
        answer = self._play[model]({name: as_array(name, each) for name, each in inputs.items()})
        return {name: as_array(name, each) for name, each in answer.items()}

    async def stream(self, model: str, inputs: Any, outputs: Any, request_id: str) -> Any:
        for answer in self._play[model](inputs):
            await asyncio.sleep(0)
            yield {name: as_array(name, each) for name, each in answer.items()}

    async def close(self) -> None:
        pass


@contextmanager
def serving(
    model: type[StreamingModel],
    *,
    llm: Sequence[str | Exception | None] = (),
    models: Mapping[str, Play] | None = None,
    decoupled: bool = True,
    **parameters: object,
) -> Iterator[LoadedModel]:
    """Load ``model`` and serve requests until the end of the block.

    ``llm``: what the language model answers (``ScriptedLLM``). ``models``: other models by name: a
    function from inputs to outputs, or to a list of them for a stream. ``parameters``: the model's.
    Raises ``AssertionError`` at the end if a rule of Triton was broken or an answer still runs.
    """
    scripted, triton = ScriptedLLM(llm), FakeTriton(batched=False)

    class Deployment(PipelineDeployment):
        def __init__(self, parameters: BlsParameters, pb_utils: Any, model_name: str) -> None:
            self._parameters, self.open, self._inner = parameters, set(), scripted
            self.defaults = Defaults(timeout_s=parameters.request_timeout_seconds or None)
            self.admission = Admission(parameters.max_running, parameters.max_queued, None)
            self.reports = RequestReports(RequestMetrics(), [RequestLog().add])

        async def close(self) -> None:
            self.reports.close()

    texts = {"tokenizer_dir": os.getcwd(), **parameters}
    config = {
        "name": "model",
        "parameters": {key: {"string_value": str(value)} for key, value in texts.items()},
        "model_transaction_policy": {"decoupled": decoupled},
    }
    served = model()
    served.deployment_type = Deployment  # type: ignore[misc]
    arguments = {"model_config": json.dumps(config), "model_name": "model"}
    served.initialize({**arguments, "model_repository": os.getcwd()}, triton)
    served.other_models = _Models(models or {})
    try:
        yield LoadedModel(served, triton, scripted)
    finally:
        served.finalize()
    assert not triton.broken, triton.broken
    assert not scripted.live, f"{scripted.live} answers of the language model still run"
