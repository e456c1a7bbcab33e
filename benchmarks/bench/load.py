"""Load by a client of our own, in several processes, where perf_analyzer does not run.

Every stream of requests is one gRPC stream, as perf_analyzer has it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import Any

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.answers import DATATYPES, Answer, Request

START_DELAY_S = 0.5  # until all processes have got their share
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


class Load:
    """``processes`` Python processes that share the streams."""

    def __init__(self, processes: int) -> None:
        self.name = f"own client, {processes} processes"
        self._processes = processes
        self._pool = multiprocessing.get_context("spawn").Pool(processes)

    def ask(self, url: str, model: str, output: str, plan: list[list[Request]]) -> list[Answer]:
        """Every stream asks its requests one after the other."""
        begin = time.time() + START_DELAY_S
        shares = [plan[n :: self._processes] for n in range(self._processes)]
        work = [(url, model, output, share, begin) for share in shares if share]
        return [answer for share in self._pool.starmap(_share, work) for answer in share]

    def close(self) -> None:
        self._pool.terminate()


def _share(
    url: str, model: str, output: str, plan: list[list[Request]], begin: float
) -> list[Answer]:
    return asyncio.run(_streams(url, model, output, plan, begin))


async def _streams(
    url: str, model: str, output: str, plan: list[list[Request]], begin: float
) -> list[Answer]:
    async with grpc.aio.insecure_channel(url, options=_OPTIONS) as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
        await channel.channel_ready()
        running = [_stream(ask, model, output, requests, begin) for requests in plan]
        answers = await asyncio.gather(*running)
    return [answer for one in answers for answer in one]


async def _stream(
    ask: Any, model: str, output: str, requests: list[Request], begin: float
) -> list[Answer]:
    call, answers = ask(), []
    messages = [_message(model, output, request) for request in requests]
    await asyncio.sleep(begin - time.time())
    for request, message in zip(requests, messages, strict=True):
        answers.append(await _answer(call, request, message, output))
    await call.done_writing()
    if await call.read() is not grpc.aio.EOF:
        answers[-1].problem = "a response came after the final one"
    return answers


async def _answer(call: Any, request: Request, message: Any, output: str) -> Answer:
    answer, replies = Answer(request, time.time_ns(), [], []), []
    await call.write(message)
    while True:
        reply = await call.read()
        if reply is grpc.aio.EOF:
            answer.problem = "the stream ended without a final response"
            break
        if reply.error_message:
            answer.problem = reply.error_message
            break
        answer.arrived.append(time.time_ns())
        replies.append(reply.infer_response)
        if reply.infer_response.parameters["triton_final_response"].bool_param:
            break
    for response in replies:
        names = [tensor.name for tensor in response.outputs]
        contents = dict(zip(names, response.raw_output_contents, strict=True))
        answer.parts.append(_text(output, contents.get(output, b"")))
        if "num_output_tokens" in contents:
            answer.counted = int(np.frombuffer(contents["num_output_tokens"], np.int32)[0])
    return answer.check()


def _text(output: str, raw: bytes) -> str:
    if output == "output_ids":
        return "".join(f"{token} " for token in np.frombuffer(raw, np.int32))
    return raw[4:].decode()  # one string, its length before it


def _message(model: str, output: str, request: Request) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, values in request.inputs.items():
        datatype = DATATYPES.get(name, "INT32")
        message.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        if datatype == "BYTES":
            text = str(values[0]).encode()
            raw = len(text).to_bytes(4, "little") + text
        else:
            raw = np.array(values, np.bool_ if datatype == "BOOL" else np.int32).tobytes()
        message.raw_input_contents.append(raw)
    outputs = [output, "sequence_length"] if output == "output_ids" else [output]
    if "return_num_output_tokens" in request.inputs:
        outputs.append("num_output_tokens")
    for name in outputs:
        message.outputs.add(name=name)
    return message
