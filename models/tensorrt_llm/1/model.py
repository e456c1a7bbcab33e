"""Model ``tensorrt_llm`` in Python: the embedded engine, or another, with the same tensors.

``trtllm-bls configure`` puts TensorRT-LLM's C++ backend in this slot for production.
"""

from __future__ import annotations

import asyncio
from functools import partial

import triton_python_backend_utils as pb_utils

from trtllm_bls.engines.local import local_engine
from trtllm_bls.engines.triton.own_port import stream_thread_has_returned
from trtllm_bls.parameters import EngineParameters, Parameters, own_grpc_url
from trtllm_bls.python_backend.request_server import RequestServer
from trtllm_bls.services.engine_service import EngineService, EngineSteps, tell_longest
from trtllm_bls.services.triton_log import log_to_triton
from trtllm_bls.tokenizer import load_tokenizer


class TritonPythonModel:
    """Serves one checkpoint; all requests run in flight together."""

    def initialize(self, args: dict[str, str]) -> None:
        log_to_triton(pb_utils, args["model_name"])
        parameters = Parameters(args).read(EngineParameters)
        self._engine = local_engine(
            args["model_name"], parameters, lambda: load_tokenizer(parameters.model_dir)
        )
        service = EngineService(
            self._engine,
            parameters.exclude_input_in_output,
            parameters.limits,
            parameters.expose_kv_cache_metrics,
        )
        self._steps = EngineSteps(pb_utils, args, service.figures)
        self._server = RequestServer(
            pb_utils,
            service.handle,
            decoupled=parameters.decoupled,
            senders=1,
            before_error_status=partial(stream_thread_has_returned, own_grpc_url()),
        )
        self.execute = self._server.accept  # Triton calls it with its requests
        told = tell_longest(self._engine, args["model_name"])
        asyncio.run_coroutine_threadsafe(told, self._server.loop)

    def finalize(self) -> None:
        self._server.close(self._engine.close)
        self._steps.close()
