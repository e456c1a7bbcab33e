"""The Triton model ``tensorrt_llm`` in Python: the embedded engine or another one.

It has the tensors of TensorRT-LLM's C++ backend, which ``trtllm-bls configure`` puts in its place
for production.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from trtllm_bls.engines.opening import open_local_engine
from trtllm_bls.engines.own_port import stream_thread_has_returned
from trtllm_bls.orchestrator.log_lines import log_to_triton
from trtllm_bls.settings.parameters import EngineParameters, Parameters, own_grpc_url
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.triton.engine_service import EngineService, EngineSteps, publish_longest_sequence
from trtllm_bls.triton.request_server import RequestServer
from trtllm_bls.triton.served_model import triton_utilities


class TritonPythonModel:
    """Serves one checkpoint. All requests run concurrently."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Called by Triton."""
        pb_utils = triton_utilities()
        name = args["model_name"]
        log_to_triton(pb_utils, name)
        parameters = Parameters(args).read(EngineParameters)
        self._engine = open_local_engine(
            name, parameters, lambda: load_tokenizer(parameters.model_dir)
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
        publishing = publish_longest_sequence(self._engine, name)
        asyncio.run_coroutine_threadsafe(publishing, self._server.loop)

    def finalize(self) -> None:
        """Called by Triton when it unloads the model."""
        self._server.close(self._engine.close)
        self._steps.close()
