"""A program that stands for a model's own while tritonserver judges its configuration.

It loads nothing, and answers each request, as those of a warm-up, with zeros in the declared
shapes. As the ``model.py`` of a backend it stands for a backend that is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A model that Triton can load and warm up."""

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._outputs = config.get("output", [])
        self._has_batch = config.get("max_batch_size", 0) > 0
        self._decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer each request once."""
        responses = [self._response(request) for request in requests]
        if not self._decoupled:
            return responses
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        for request, response in zip(requests, responses, strict=True):
            request.get_response_sender().send(response, flags=final)
        return None

    def _response(self, request: Any) -> Any:
        inputs = request.inputs()
        batch: list[int] = []
        if self._has_batch and inputs:
            batch = [inputs[0].as_numpy().shape[0]]
        elif self._has_batch:
            batch = [1]
        tensors = []
        for output in self._outputs:
            if output["name"] in request.requested_output_names():
                shape = batch + [max(int(size), 1) for size in output["dims"]]
                dtype = pb_utils.triton_string_to_numpy(output["data_type"])
                tensors.append(pb_utils.Tensor(output["name"], np.zeros(shape, dtype)))
        return pb_utils.InferenceResponse(tensors)
