"""Model ``tensorrt_llm_bls``: text in, text out, through the orchestrator."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from trtllm_bls.engines.triton.stream_thread import StreamThread
from trtllm_bls.parameters import BlsParameters, Parameters
from trtllm_bls.parameters.engine_tls import engine_tls
from trtllm_bls.python_backend import RequestServer
from trtllm_bls.services.deployment import Deployment
from trtllm_bls.services.lifecycle import Lifecycle
from trtllm_bls.services.text_service import TextService
from trtllm_bls.services.triton_log import log_to_triton


class TritonPythonModel:
    """One instance serves all streams; requests never wait for each other."""

    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args).read(BlsParameters)
        self._deployment = Deployment(parameters, pb_utils, args["model_name"])
        service = TextService(
            self._deployment.orchestrator,
            decoupled=parameters.decoupled,
            limits=parameters.limits,
            exclude_input=parameters.exclude_input_in_output,
        )
        self._server = RequestServer(
            pb_utils,
            service.handle,
            decoupled=parameters.decoupled,
            log_ends=not parameters.log_requests,  # which has a line for them, too
            prepare_batch=service.prepare_batch,
            before_error_status=StreamThread(
                parameters.engine_url, engine_tls(parameters)
            ).has_returned,
            one_core=parameters.keeps_one_core,
        )
        self._lifecycle: Lifecycle | None = None
        if parameters.status_dir:
            self._lifecycle = Lifecycle(self._server, self._deployment, parameters.status_dir)
        self._deployment.start(self._server.loop)
        self.execute = self._server.accept  # Triton calls it with its requests

    def finalize(self) -> None:
        if self._lifecycle is not None:
            self._lifecycle.close()
        self._server.close(self._deployment.close)
