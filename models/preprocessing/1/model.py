"""Model ``preprocessing``: tensors in, ``services.tokens.Preprocessor``, tensors out."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_bls.parameters import Parameters, request_limits, rows_of
from trtllm_bls.python_backend import answer_each
from trtllm_bls.services.tokens import Preprocessor
from trtllm_bls.services.triton_log import log_to_triton
from trtllm_bls.tokenizer import load_tokenizer


class TritonPythonModel:
    """Tokenises text; one answer per request."""

    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args).read(rows_of("preprocessing").values())
        tokenizer = load_tokenizer(parameters["tokenizer_dir"])
        self._service = Preprocessor(
            tokenizer, parameters["add_special_tokens"], request_limits(parameters)
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return answer_each(pb_utils, requests, self._service.arrays)
