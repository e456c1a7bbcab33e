"""Door of ``tensorrt_llm_bls``: text in, text out, through the orchestrator."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_bls.door import Door, log_to_triton
from trtllm_bls.parameters import BlsParameters, Parameters
from trtllm_bls.services.text import TextService


class TritonPythonModel:
    """One instance serves all streams; requests never wait for each other."""

    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        self._service = TextService.assemble(BlsParameters.read(Parameters(args)), pb_utils)
        self._door = Door(pb_utils, self._service.handle)

    def execute(self, requests: list[Any]) -> None:
        self._door.accept(requests)

    def finalize(self) -> None:
        self._door.close(self._service.close)
