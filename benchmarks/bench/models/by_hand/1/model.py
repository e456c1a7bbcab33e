"""Text in, text out as it is written by hand: a task per request, the engine over ``grpc.aio``.

It has no stops, limits, metrics, deadlines or exact text of characters in several tokens, and does
not notice a caller who leaves.
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


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
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
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().item()
            length = pb_utils.get_input_tensor_by_name(request, "max_tokens").as_numpy().item()
            answer = self._answer(text.decode(), length, request.get_response_sender())
            asyncio.run_coroutine_threadsafe(answer, self._loop)

    async def _answer(self, text: str, length: int, sender: Any) -> None:
        ids: list[int] = []
        sent = ""
        try:
            async for reply in self._engine.ModelStreamInfer(iter([self._message(text, length)])):
                if reply.error_message:
                    raise RuntimeError(reply.error_message)
                ids += np.frombuffer(reply.infer_response.raw_output_contents[0], np.int32).tolist()
                said = self._tokenizer.decode(ids)
                new, sent = said[len(sent) :], said
                array = np.array([new.encode()], object)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", array)])
                final = reply.infer_response.parameters["triton_final_response"].bool_param
                sender.send(response, flags=_FINAL if final else 0)
        except Exception as error:  # without an answer the caller would wait for ever
            failure = pb_utils.TritonError(f"{type(error).__name__}: {error}")
            sender.send(pb_utils.InferenceResponse([], error=failure), flags=_FINAL)

    def _message(self, text: str, length: int) -> Any:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        message = service_pb2.ModelInferRequest(model_name="tensorrt_llm")
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in (
            ("input_ids", ids),
            ("input_lengths", [len(ids)]),
            ("request_output_len", [length]),
            ("streaming", [True]),
        ):
            array = np.array([value], np.bool_ if name == "streaming" else np.int32)
            datatype = "BOOL" if name == "streaming" else "INT32"
            message.inputs.add(name=name, datatype=datatype, shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
        for name in ("output_ids", "sequence_length"):
            message.outputs.add(name=name)
        return message

    def finalize(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
