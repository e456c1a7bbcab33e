"""The tensors of upstream's ``llmapi`` model as those of ``tensorrt_llm_bls``, and back.

They have no batch dimension. Outputs have the types that upstream's configuration declares, which
its model does not keep.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trtllm_bls.contract import BLS, LLMAPI
from trtllm_bls.errors import InvalidRequest, Unsupported
from trtllm_bls.types import Array

_MAX_TOKENS = 32  # the LLM API's own default
_ASKED = {
    "finish_reason": "return_finish_reason",
    "stop_reason": "return_stop_reason",
    "cumulative_logprob": "return_cumulative_logprob",
}


def as_text_inputs(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """One row of inputs. Raises ``InvalidRequest``."""
    if "text_input" not in arrays or arrays["text_input"].ndim != 1:
        raise InvalidRequest("text_input", "is missing or not one text: its shape must be [1]")
    best_of = arrays.get("sampling_param_best_of")
    if best_of is not None and (best_of != 1).any():
        problem = f"{best_of.reshape(-1)[0]}; one text is sent for a prompt, send 1"
        raise Unsupported("sampling_param_best_of", problem)
    named = {tensor.name: tensor.key for tensor in LLMAPI.inputs}
    inputs = {named[name]: array[None] for name, array in arrays.items() if name in named}
    inputs["text_input"] = arrays["text_input"][None, :1]
    inputs.setdefault("max_tokens", np.array([[_MAX_TOKENS]], np.int32))
    if inputs.keys().isdisjoint(("top_k", "top_p")) and (inputs.get("temperature", 0) != 0):
        inputs["top_p"] = np.array([[1.0]], np.float32)  # a temperature alone samples there
    return {name: array for name, array in inputs.items() if name in BLS.input_named}


def as_llmapi_outputs(outputs: Mapping[str, Array], asked: Mapping[str, Array]) -> dict[str, Array]:
    """What upstream's model sends to a request with the inputs ``asked``."""
    flags = {None, *(name for name, array in asked.items() if array.any())}
    found = {
        tensor.name: outputs[tensor.key].reshape(-1)
        for tensor in LLMAPI.outputs
        if tensor.key in outputs and _ASKED.get(tensor.name) in flags
    }
    if (reason := found.get("finish_reason")) is not None and reason[0] == b"end_id":
        found["finish_reason"] = np.array([b"stop"], np.object_)  # there is one word for both
    return found
