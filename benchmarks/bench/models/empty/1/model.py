"""The least that a model between client and engine can do: what a hop through Triton costs.

Takes the engine's tensors, asks the engine for them by gRPC, and answers every response with one
string, the token's id in decimals. No text, no stops, no watching for callers that left.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import grpc.aio
import numpy as np
import triton_python_backend_utils as pb_utils
from tritonclient.grpc import service_pb2, service_pb2_grpc

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TYPES = {"bool": "BOOL", "int32": "INT32"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result()

    async def _connect(self) -> None:
        channel = grpc.aio.insecure_channel(os.environ["TRTLLM_BLS_GRPC_URL"])
        self._engine = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            forward = self._forward(_message(request), request.get_response_sender())
            asyncio.run_coroutine_threadsafe(forward, self._loop)

    async def _forward(self, message: Any, sender: Any) -> None:
        try:
            async for reply in self._engine.ModelStreamInfer(iter([message])):
                if reply.error_message:
                    raise RuntimeError(reply.error_message)
                ids = np.frombuffer(reply.infer_response.raw_output_contents[0], np.int32)
                text = np.array([["".join(f"{token} " for token in ids)]], object)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
                final = reply.infer_response.parameters["triton_final_response"].bool_param
                sender.send(response, flags=_FINAL if final else 0)
        except Exception as error:  # without an answer the caller would wait for ever
            failure = pb_utils.TritonError(f"{type(error).__name__}: {error}")
            sender.send(pb_utils.InferenceResponse([], error=failure), flags=_FINAL)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _message(request: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    for tensor in request.inputs():
        array = tensor.as_numpy()
        message.inputs.add(name=tensor.name(), datatype=_TYPES[array.dtype.name], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for name in ("output_ids", "sequence_length"):
        message.outputs.add(name=name)
    return message
