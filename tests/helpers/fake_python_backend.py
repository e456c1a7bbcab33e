"""``pb_utils`` without Triton: the package's own fake, and a child behind Triton's BLS API."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_bls.services import testing
from trtllm_bls.services.testing import (
    SECONDS,
    Ask,
    InferenceResponse,
    Tensor,
    TritonError,
    TritonModelError,
)

__all__ = ["Ask", "Child", "FakeTriton", "InferenceResponse", "Tensor", "TritonError"]
__all__ += ["TritonModelError"]


class FakeTriton(testing.FakeTriton):
    """``child`` is the model that BLS requests reach."""

    def __init__(self, child: Child | None = None) -> None:
        super().__init__()
        self.InferenceRequest = functools.partial(InferenceRequest, child)


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
