"""An engine that costs next to nothing: each request's own prompt comes back, over and over.

All streams of an instance get a token at every step, as with in-flight batching: an idle engine
starts a step when a request comes, a busy one takes requests in at the next step. If the sends of
a step take longer than the step, steps are late; nothing is skipped.

Parameter: ``step_ms``. Tensors are made once per id, so a token costs little more than its send.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Stream:
    """One request: what is still to be sent to whom."""

    def __init__(self, request: Any) -> None:
        # Copied, since Triton frees its tensors; no list, since making one of half a million ids
        # holds the interpreter's lock, and so the next step, for longer than an engine in C++.
        def values(name: str) -> Any:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return tensor.as_numpy().ravel().copy()

        self.sender = request.get_response_sender()
        self.prompt = values("input_ids")
        self.length = int(values("request_output_len")[0])
        self.sent = 0


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._step = float(parameters["step_ms"]["string_value"]) / 1000
        self._arrived: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._tensors: dict[int, Any] = {}
        self._one = pb_utils.Tensor("sequence_length", np.array([[1]], np.int32))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._arrived.put(Stream(request))

    def finalize(self) -> None:
        self._arrived.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = 0.0
        streams: list[Stream] = []
        while True:
            if not streams:
                arrived = self._arrived.get()
                due = time.monotonic()
            else:
                arrived = None if self._arrived.empty() else self._arrived.get()
            while arrived is not None:
                streams.append(arrived)
                arrived = None if self._arrived.empty() else self._arrived.get()
            if not streams:
                return  # a request to end
            due = max(due + self._step, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
            streams = [stream for stream in streams if self._send(stream)]

    def _send(self, stream: Stream) -> bool:
        """Send the next token; whether there are more."""
        token = int(stream.prompt[stream.sent % len(stream.prompt)])
        if token not in self._tensors:
            ids = np.array([[[token]]], np.int32)
            self._tensors[token] = pb_utils.Tensor("output_ids", ids)
        stream.sent += 1
        response = pb_utils.InferenceResponse([self._tensors[token], self._one])
        last = stream.sent == stream.length
        stream.sender.send(response, flags=_FINAL if last else 0)
        return not last
