"""Requests as tensors of the wire, and what is read from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from trtllm_bls.configure.pbtxt import model_config
from trtllm_bls.engines.triton_model import DeployedModel, request_inputs
from trtllm_bls.triton.tensors import engine_requests, text_requests
from trtllm_bls.types import EngineRequest, TextRequest
from trtllm_bls.wire.contract import ENGINE

VOCAB = 50
LAST_FORM = DeployedModel.of(model_config(ENGINE, {}))
ASK = EngineRequest(request_id="r", input_ids=(7, 8), max_tokens=4)


def declaring(**inputs: str | None) -> DeployedModel:
    """A model of the last form that declares some inputs in another type, or not at all."""
    declared = {**LAST_FORM.inputs, **inputs}
    inputs = {name: kind for name, kind in declared.items() if kind is not None}
    return replace(LAST_FORM, inputs=inputs)


def sent(request: EngineRequest, model: DeployedModel = LAST_FORM) -> dict[str, Any]:
    """The inputs of a request as arrays by name; each in the type that the model declares."""
    inputs = request_inputs(request, model, VOCAB)
    assert all(model.inputs[name] == datatype for name, datatype, _ in inputs)
    return {name: array for name, _, array in inputs}


def column(*values: Any, dtype: Any = np.int32) -> Any:
    return np.array([[value] for value in values], dtype=dtype)


def words(*texts: str | bytes) -> Any:
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]
    return np.array([encoded], dtype=np.object_)


def text_inputs(**more: Any) -> dict[str, Any]:
    return {"text_input": words("hi"), "max_tokens": column(5), **more}


def text(**more: Any) -> TextRequest:
    (request,) = text_requests(text_inputs(**more), "r")
    return request


def engine(**more: Any) -> EngineRequest:
    inputs = {
        "input_ids": np.array([[7, 8]], np.int32),
        "input_lengths": column(2),
        "request_output_len": column(4),
        **more,
    }
    ((request, _),) = engine_requests(inputs, "r", None)
    return request
