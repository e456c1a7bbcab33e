"""``triton_python_backend_utils`` without Triton, keeping the rules that the real one punishes.

A request ends in exactly one FINAL; nothing is sent after it, and an error only with it; a closed
sender is never asked whether its caller has gone; no two sends of one request overlap; only
requested outputs are sent; the first dimension of every tensor is 1. A breach raises where it
happens and is kept in ``FakeTriton.broken``, since a thread may swallow what is raised in it.
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
            self._receive(response, final=flags == FINAL)
        finally:
            self._sending.release()

    def _receive(self, response: InferenceResponse | None, final: bool) -> None:
        with self._changed:
            if self._closed:
                raise self._triton.breach("send after FINAL")
            if response is not None:
                self._take(response, final)
            elif not final:
                raise self._triton.breach("an empty send without FINAL")
            self._closed = final
            self._changed.notify_all()

    def _take(self, response: InferenceResponse, final: bool) -> None:
        if response.has_error():
            if not final:
                raise self._triton.breach("an error without FINAL in the same send")
            self.error = response.error()
            return
        arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        if more := arrays.keys() - set(self._outputs):
            raise self._triton.breach(f"outputs nobody asked for: {more}: the stub would crash")
        if wide := [name for name, array in arrays.items() if array.shape[0] != 1]:
            raise self._triton.breach(f"first dimension of a response is not 1: {wide}")
        self.responses.append(arrays)


def _lent(array: Any) -> Any:
    """An array over memory that stays the lender's, as far as an array tells that."""
    if array.dtype == object or not array.size:
        return array
    return np.frombuffer(memoryview(array), array.dtype).reshape(array.shape)


class _Logger:
    def __init__(self, lines: list[tuple[str, str]]) -> None:
        self._lines = lines

    def log_info(self, text: str) -> None:
        self._lines.append(("info", text))

    def log_warn(self, text: str) -> None:
        self._lines.append(("warn", text))

    def log_error(self, text: str) -> None:
        self._lines.append(("error", text))


class FakeTriton:
    """The module ``pb_utils``; ``child`` is the model that BLS requests reach."""

    Tensor, TritonError, InferenceResponse = Tensor, TritonError, InferenceResponse

    def __init__(self, child: Child | None = None) -> None:
        self.broken: list[str] = []
        self.lines: list[tuple[str, str]] = []
        self.Logger = _Logger(self.lines)
        self.InferenceRequest = functools.partial(InferenceRequest, child)

    def breach(self, rule: str) -> Exception:
        self.broken.append(rule)
        return TritonModelError(rule)

    def ask(self, inputs: Mapping[str, Any], *outputs: str, id: str = "") -> Ask:
        """A request as Triton hands it to a model; see ``Ask``."""
        return Ask(self, inputs, outputs, id)


# --- a decoupled child behind the BLS API ---------------------------------------------------


class InferenceRequest:
    def __init__(
        self,
        child: Child,
        *,
        model_name: str,
        request_id: str,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        self.child, self.model_name, self.id = child, model_name, request_id
        self.parameters = dict(parameters or {})
        self.name = request_id.partition("/")[2]  # without the number before it
        self.outputs = list(requested_output_names)
        self.inputs = {tensor.name(): tensor.as_numpy() for tensor in inputs}

    def exec(self, decoupled: bool = False) -> ResponseIterator:
        assert decoupled, "a decoupled child cannot be asked for a single response"
        return self.child.take(self)


class Child:
    """Plays ``steps`` to every request, or those given for its id; see ``_play``."""

    STOPPED = object()  # nothing comes until a stop request with the same id
    SILENCE = object()  # nothing comes until ``released`` once, as when Triton loses an error

    def __init__(self, *steps: Any, **steps_by_id: Sequence[Any]) -> None:
        self.steps, self.steps_by_id = steps, steps_by_id
        self.asked: list[InferenceRequest] = []
        self.stops: list[InferenceRequest] = []
        self.iterators: list[weakref.ref[ResponseIterator]] = []
        self.released = threading.Semaphore(0)
        self.drained = threading.Semaphore(0)  # one more for each request read to its end
        self._stopped: dict[str, threading.Event] = {}

    def take(self, request: InferenceRequest) -> ResponseIterator:
        if request.inputs.get("stop", np.zeros(1)).any():
            self.stops.append(request)
            self._stopped.setdefault(request.id, threading.Event()).set()
            return self._iterator(iter([InferenceResponse([])]))
        self.asked.append(request)
        return self._iterator(self._play(request))

    def _iterator(self, responses: Iterator[InferenceResponse]) -> ResponseIterator:
        iterator = ResponseIterator(responses)
        self.iterators.append(weakref.ref(iterator))
        return iterator

    def _play(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        stopped = self._stopped.setdefault(request.id, threading.Event())
        for step in self.steps_by_id.get(request.name, self.steps):
            if step is self.STOPPED:
                assert stopped.wait(SECONDS), "no stop request came"
            elif step is self.SILENCE:
                assert self.released.acquire(timeout=SECONDS), (
                    "the test forgot to release its child"
                )
            elif isinstance(step, Exception):
                raise step
            else:
                yield step
        self.drained.release()


class ResponseIterator:
    """The real one must stay referenced for a while after its end, so it can be watched here."""

    def __init__(self, responses: Iterator[InferenceResponse]) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        return next(self._responses)
