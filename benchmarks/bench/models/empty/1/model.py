"""What a hop through Triton costs: the engine over ``grpc.aio``, with a task per request.

``empty`` is the least that a model between client and engine can do. It takes the engine's tensors
and answers every response with one string, the ids in decimals. ``by_hand``, whose model.py is a
link to this file, takes text and answers with text, as one writes it by hand.

No stops, limits, metrics, deadlines, exact text of characters in several tokens, or watching for
callers that left.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer
from tritonclient.grpc import service_pb2, service_pb2_grpc

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TYPES = {"bool": "BOOL", "int32": "INT32"}


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = None
        if "tokenizer_dir" in parameters:
            directory = os.environ.get("TRTLLM_BLS_MODEL_DIR") or parameters["tokenizer_dir"]
            self._tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result()

    async def _connect(self) -> None:
        channel = grpc.aio.insecure_channel(os.environ["TRTLLM_BLS_GRPC_URL"])
        self._engine = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            if self._tokenizer is not None:
                inputs = self._engine_inputs(inputs)
            forward = self._forward(_message(inputs), request.get_response_sender())
            asyncio.run_coroutine_threadsafe(forward, self._loop)

    def _engine_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        text = inputs["text_input"].item().decode()
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        values = {"input_ids": ids, "input_lengths": [len(ids)]}
        values["request_output_len"] = [inputs["max_tokens"].item()]
        arrays = {name: np.array([value], np.int32) for name, value in values.items()}
        return arrays | {"streaming": np.array([[True]])}

    async def _forward(self, message: Any, sender: Any) -> None:
        ids: list[int] = []
        sent = ""
        try:
            async for reply in self._engine.ModelStreamInfer(iter([message])):
                if reply.error_message:
                    raise RuntimeError(reply.error_message)
                new = np.frombuffer(reply.infer_response.raw_output_contents[0], np.int32)
                if self._tokenizer is None:
                    text = "".join(f"{token} " for token in new)
                else:
                    ids += new.tolist()
                    whole = self._tokenizer.decode(ids)
                    text, sent = whole[len(sent) :], whole
                array = np.array([[text]], object)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)])
                final = reply.infer_response.parameters["triton_final_response"].bool_param
                sender.send(response, flags=_FINAL if final else 0)
        except Exception as error:  # without an answer the caller would wait for ever
            failure = pb_utils.TritonError(f"{type(error).__name__}: {error}")
            sender.send(pb_utils.InferenceResponse([], error=failure), flags=_FINAL)

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _message(inputs: dict[str, Any]) -> Any:
    message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
    for name, array in inputs.items():
        message.inputs.add(name=name, datatype=_TYPES[array.dtype.name], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    for name in ("output_ids", "sequence_length"):
        message.outputs.add(name=name)
    return message
