"""Door of a scripted engine: steps of a set time, a draft that is right in a set share of contexts.

Parameters: ``step_ms``, ``agrees`` (1 = the target itself), ``vocab_size``.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_bls.door import Door, log_to_triton
from trtllm_bls.engines.scripted import Script, ScriptedEngine
from trtllm_bls.engines.scripted_tokens import agreeing, hashed
from trtllm_bls.parameters import Parameters
from trtllm_bls.services.engine import EngineService


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args)
        vocab_size = int(parameters.number("vocab_size", 1000))
        rule = agreeing(hashed(vocab_size), parameters.number("agrees", 1), vocab_size)
        script = Script(vocab_size=vocab_size, step_seconds=parameters.number("step_ms", 0) / 1000)
        self._engine = ScriptedEngine(rule, script)
        self._door = Door(pb_utils, EngineService(self._engine, exclude_input=True).handle)

    def execute(self, requests: list[Any]) -> None:
        self._door.accept(requests)

    def finalize(self) -> None:
        self._door.close(self._engine.close)
