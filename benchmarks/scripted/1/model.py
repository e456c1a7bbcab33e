"""A scripted engine with no more Python in its way than must be: it stands for a C++ backend.

Steps of a set time; a draft that is right in a set share of contexts. It knows the tensors that
benchmarks send, reads greedy requests of one row, and answers from threads that sleep.

Parameters: ``step_ms``, ``agrees`` (1 = the target itself), ``vocab_size``.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from doubles.scripted_tokens import agreeing, hashed
from trtllm_bls.settings.parameters import NUMBER, Parameters, count

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(frozen=True, kw_only=True)
class ScriptedParameters:
    step_ms: float = NUMBER.parameter("Time of one step.", "0")
    vocab_size: int = count(1).parameter("Tokens there are.", "1000")
    agrees: float = NUMBER.parameter("How often it says what the target would.", "1")


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = Parameters(args).read(ScriptedParameters)
        vocab_size = parameters.vocab_size
        self._rule = agreeing(hashed(vocab_size), parameters.agrees, vocab_size)
        self._step = parameters.step_ms / 1000
        self._threads = ThreadPoolExecutor(256)

    def execute(self, requests: list[Any]) -> None:
        begun = time.monotonic()
        for request in requests:
            sender, asked = request.get_response_sender(), {}
            for tensor in request.inputs():  # copied: Triton frees them when this returns
                asked[tensor.name()] = np.array(tensor.as_numpy()).ravel().tolist()
            self._threads.submit(self._answer, sender, asked, begun)

    def _answer(self, sender: Any, asked: dict[str, Any], begun: float) -> None:
        try:
            (self._verify if "draft_input_ids" in asked else self._decode)(sender, asked, begun)
        except Exception as error:  # without an answer the caller would wait for ever
            failure = pb_utils.TritonError(f"{type(error).__name__}: {error}")
            sender.send(pb_utils.InferenceResponse([], error=failure), flags=_FINAL)

    def _verify(self, sender: Any, asked: dict[str, Any], begun: float) -> None:
        """One step: the part of the draft that is right, and one token more."""
        context, answer = asked["input_ids"], []
        for guess in (*asked["draft_input_ids"], None):
            answer.append(self._rule([*context, *answer]))
            if answer[-1] != guess:
                break
        _sleep_until(begun + self._step)
        _send(sender, answer, final=True)

    def _decode(self, sender: Any, asked: dict[str, Any], begun: float) -> None:
        """A step for each token, all sent at the end unless they are to be streamed."""
        context, (most,) = asked["input_ids"], asked["request_output_len"]
        for made in range(1, most + 1):
            context.append(self._rule(context))
            if asked.get("streaming") == [True]:
                _sleep_until(begun + made * self._step)
                if made < most and sender.is_cancelled():
                    sender.send(flags=_FINAL)
                    return
                _send(sender, context[-1:], final=made == most)
        if asked.get("streaming") != [True]:
            _sleep_until(begun + most * self._step)
            _send(sender, context[-most:], final=True)

    def finalize(self) -> None:
        self._threads.shutdown()


def _sleep_until(due: float) -> None:
    """To the microsecond, as a step on a device ends: the last half millisecond is spun away."""
    time.sleep(max(0.0, due - time.monotonic() - 0.0005))
    while time.monotonic() < due:
        pass


def _send(sender: Any, ids: list[int], *, final: bool) -> None:
    tensors = [
        pb_utils.Tensor("output_ids", np.array([[ids]], np.int32)),
        pb_utils.Tensor("sequence_length", np.array([[len(ids)]], np.int32)),
    ]
    sender.send(pb_utils.InferenceResponse(tensors), flags=_FINAL if final else 0)
