"""Model ``postprocessing``: tensors in, ``services.text_service.Postprocessor``, tensors out."""

from __future__ import annotations

from functools import partial

import triton_python_backend_utils as pb_utils

from trtllm_bls.engines.triton.own_port import stream_thread_has_returned
from trtllm_bls.parameters import Parameters, PostprocessingParameters, own_grpc_url
from trtllm_bls.python_backend.request_server import RequestServer, answering
from trtllm_bls.services.text_service import Postprocessor
from trtllm_bls.services.triton_log import log_to_triton
from trtllm_bls.tokenizer import load_tokenizer


class TritonPythonModel:
    """Detokenises ids; one answer per request."""

    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args).read(PostprocessingParameters)
        service = Postprocessor(
            load_tokenizer(parameters.tokenizer_dir),
            parameters.skip_special_tokens,
            parameters.limits,
        )
        self._server = RequestServer(
            pb_utils,
            answering(service.arrays),
            decoupled=False,
            senders=1,
            log_ends=False,
            before_error_status=partial(stream_thread_has_returned, own_grpc_url()),
        )
        self.execute = self._server.accept  # Triton calls it with its requests

    def finalize(self) -> None:
        self._server.close()
