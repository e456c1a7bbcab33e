"""Load by several processes, over the engine's gRPC, Triton's gRPC, or HTTP.

Every stream asks its requests one after the other. While a load runs, a read of a socket costs its
framing and a time; messages and events are parsed once all answers have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httptools
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2

from bench.answers import DATATYPES, Answer, Request
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.wire.grpc_client import GrpcChannel, GrpcError

START_DELAY_S = 0.5  # until all processes have got their share
TRITON = "/inference.GRPCInferenceService/ModelStreamInfer"
# Path, the fields of prompt and limit, and the event that ends an answer.
_HTTP = {
    "completions": ("/v1/completions", "prompt", "max_tokens", "[DONE]"),
    "chat": ("/v1/chat/completions", "messages", "max_tokens", "[DONE]"),
    "responses": ("/v1/responses", "input", "max_output_tokens", "[DONE]"),
    "messages": ("/v1/messages", "messages", "max_tokens", "message_stop"),
    "generate": ("/v2/models/tensorrt_llm_bls/generate_stream", "text_input", "max_tokens", ""),
}


@dataclass(frozen=True)
class Target:
    """Where requests go, HOST:PORT each: the streams take turns over ``urls``.

    ``api``: "service", "triton", or one of ``_HTTP``. ``output``: the tensor that Triton is asked
    for.
    """

    api: str
    urls: tuple[str, ...]
    model: str = ""
    output: str = "text_output"


class Load:
    """``processes`` Python processes that share the streams."""

    def __init__(self, processes: int) -> None:
        self.name = f"own client, {processes} processes"
        self._processes = processes
        self._pool = multiprocessing.get_context("spawn").Pool(processes)

    def ask(self, target: Target, plan: list[list[Request]]) -> list[Answer]:
        """All answers; each is checked."""
        begin = time.time() + START_DELAY_S
        shares = [plan[n :: self._processes] for n in range(self._processes)]
        work = [(target, share, begin) for share in shares if share]
        return list(itertools.chain(*self._pool.starmap(_share, work, chunksize=1)))

    def close(self) -> None:
        self._pool.terminate()


def _share(target: Target, plan: list[list[Request]], begin: float) -> list[Answer]:
    stream = _http_stream if target.api in _HTTP else _grpc_stream

    async def run() -> list[Answer]:
        turns = itertools.cycle([(url, GrpcChannel(url)) for url in target.urls])
        running = [stream(*next(turns), target, requests, begin) for requests in plan]
        return list(itertools.chain(*await asyncio.gather(*running)))

    answers = uvloop.run(run())
    for answer in answers:
        _finish(target, answer)
    return answers


def _finish(target: Target, answer: Answer) -> None:
    """Read what came, and check it."""
    raw, times, answer.arrived, answer.raw = answer.raw or [], answer.arrived, [], None
    if answer.problem is None:
        read = _GRPC_READERS.get(target.api, _read_events)
        for arrived, text in read(target, answer, times, raw):
            answer.arrived.append(arrived)
            answer.parts.append(text)
    answer.check()


# --- gRPC ----------------------------------------------------------------------------------------


async def _grpc_stream(
    url: str, channel: GrpcChannel, target: Target, requests: list[Request], begin: float
) -> list[Answer]:
    if target.api == "triton":
        method = TRITON
        encoded = [triton_message(target.model, target.output, each.inputs) for each in requests]
    else:
        method, stream = messages.SERVICE + "Generate", f"{url}-{id(requests)}"
        encoded = [_service_message(f"{stream}-{n}", each) for n, each in enumerate(requests)]
    await asyncio.sleep(begin - time.time())
    return [
        await _grpc_answer(channel, method, Answer(request, 0, [], []), message)
        for request, message in zip(requests, encoded, strict=True)
    ]


async def _grpc_answer(channel: GrpcChannel, method: str, answer: Answer, message: bytes) -> Answer:
    done: asyncio.Future[GrpcError | None] = asyncio.get_running_loop().create_future()
    answer.raw = raw = list[bytes]()

    def on_messages(arrived: list[bytes]) -> None:
        answer.arrived += [time.time_ns()] * len(arrived)
        raw.extend(arrived)

    answer.started = time.time_ns()
    call = channel.open(method, on_messages, done.set_result)
    call.send(message)
    call.half_close()
    error = await done
    answer.problem = None if error is None else str(error)
    return answer


def _service_message(request_id: str, request: Request) -> bytes:
    message = messages.GenerateRequest(request_id=request_id, streaming=True, ignore_eos=True)
    message.tokenized.input_token_ids.extend(request.inputs["input_ids"])
    message.max_tokens = request.inputs["request_output_len"][0]
    message.sampling_config.top_k = 1
    encoded: bytes = message.SerializeToString()
    return encoded


def _read_service(
    target: Target, answer: Answer, times: list[int], raw: list[bytes]
) -> Iterator[tuple[int, str]]:
    for arrived, message in zip(times, raw, strict=True):
        for token in messages.GenerateResponse.FromString(message).chunk.token_ids:
            yield arrived, f"{token} "


def triton_message(model: str, output: str, inputs: dict[str, list[Any]]) -> bytes:
    """A request for ``output``, or for the model's ids with their number."""
    message = service_pb2.ModelInferRequest(model_name=model)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, values in inputs.items():
        datatype = DATATYPES.get(name, "INT32")
        message.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        if datatype == "BYTES":
            text = str(values[0]).encode()
            raw = len(text).to_bytes(4, "little") + text
        else:
            raw = np.array(values, np.bool_ if datatype == "BOOL" else np.int32).tobytes()
        message.raw_input_contents.append(raw)
    outputs = [output]
    if output == "output_ids":
        outputs.append("sequence_length")
    if "return_num_output_tokens" in inputs:
        outputs.append("num_output_tokens")
    for name in outputs:
        message.outputs.add(name=name)
    encoded: bytes = message.SerializeToString()
    return encoded


def triton_problem(message: bytes) -> str:
    """What a reply says went wrong, or nothing."""
    problem: str = service_pb2.ModelStreamInferResponse.FromString(message).error_message
    return problem


def _read_triton(
    target: Target, answer: Answer, times: list[int], raw: list[bytes]
) -> Iterator[tuple[int, str]]:
    final = False
    for arrived, message in zip(times, raw, strict=True):
        reply = service_pb2.ModelStreamInferResponse.FromString(message)
        response = reply.infer_response
        if reply.error_message or final:
            answer.problem = reply.error_message or "a response came after the final one"
            return
        final = response.parameters["triton_final_response"].bool_param
        names = [tensor.name for tensor in response.outputs]
        contents = dict(zip(names, response.raw_output_contents, strict=True))
        if "num_output_tokens" in contents:
            answer.counted = int(np.frombuffer(contents["num_output_tokens"], np.int32)[0])
        content = contents.get(target.output, b"")
        if target.output == "output_ids":
            yield arrived, "".join(f"{token} " for token in np.frombuffer(content, np.int32))
        else:
            yield arrived, content[4:].decode()  # one string, its length before it
    if not final:
        answer.problem = "the stream ended without a final response"


# --- HTTP ----------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One HTTP connection; ``times`` and ``bodies`` are of the last reply."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.bodies: list[bytes] = []
        self.done: asyncio.Future[int] | None = None
        self.closed = False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.time_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.times.append(self._now)
        self.bodies.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self._parser = httptools.HttpResponseParser(self)
        self._finish(status)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._finish(0)

    def _finish(self, status: int) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(status)

    async def ask(self, request: bytes) -> int:
        """The reply's status; 0 if the connection was lost."""
        self.times, self.bodies = [], []
        self.done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self.done


async def connected(url: str) -> Connection:
    host, _, port = url.rpartition(":")
    _, client = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
    return client


def post(path: str, fields: dict[str, Any]) -> bytes:
    """A request with a JSON body."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def events(times: list[int], bodies: list[bytes]) -> Iterator[tuple[int, str]]:
    """The data of each event; an event is there when its last byte is."""
    rest = b""
    for arrived, body in zip(times, bodies, strict=True):
        *blocks, rest = (rest + body).split(b"\n\n")
        for block in blocks:
            for line in block.decode().split("\n"):
                if line.startswith("data: "):
                    yield arrived, line.removeprefix("data: ")
    if rest:
        yield times[-1], json.dumps({"error": f"half an event: {rest[:80]!r}"})


def messages_of(text: object) -> list[dict[str, object]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": text}]


async def _http_stream(
    url: str, _: object, target: Target, requests: list[Request], begin: float
) -> list[Answer]:
    client = await connected(url)
    encoded = [_http_request(target, request) for request in requests]
    await asyncio.sleep(begin - time.time())
    answers = []
    for request, message in zip(requests, encoded, strict=True):
        answer = Answer(request, time.time_ns(), [], [])
        status = await client.ask(message)
        answer.arrived, answer.raw = client.times, client.bodies
        if status != 200:
            text = b"".join(client.bodies)[:200].decode(errors="replace")
            answer.problem = f"HTTP status {status}: {text}"
        answers.append(answer)
        if not status:
            client = await connected(url)
    return answers


def _http_request(target: Target, request: Request) -> bytes:
    path, prompt, limit, _ = _HTTP[target.api]
    (text,) = request.inputs["text_input"]
    said = text if target.api in ("completions", "generate") else messages_of(text)
    fields = {prompt: said, limit: request.inputs["max_tokens"][0], "stream": True}
    if target.api != "generate":
        fields |= {"model": target.model, "temperature": 0}
    if target.api in ("completions", "chat"):
        fields["ignore_eos"] = True
    if target.api in ("completions", "generate") and "add_special_tokens" in request.inputs:
        fields["add_special_tokens"] = request.inputs["add_special_tokens"][0]
    return post(path, fields)


def _read_events(
    target: Target, answer: Answer, times: list[int], bodies: list[bytes]
) -> Iterator[tuple[int, str]]:
    """One part for each event with text."""
    end, last = _HTTP[target.api][3], ""
    for arrived, data in events(times, bodies):
        last = data
        if data == "[DONE]":
            continue
        event = json.loads(data)
        last = event.get("type", last)
        if event.get("error") or last == "response.failed":
            answer.problem = str(event.get("error", event))
        if text := text_of(event):
            yield arrived, text
    if end and last != end:
        answer.problem = answer.problem or f"the stream ended without {end}"


def text_of(event: dict[str, Any]) -> str:
    """The text that an event of any of the APIs carries."""
    if event.get("choices"):
        (choice,) = event["choices"]
        text = choice.get("text") or choice.get("delta", {}).get("content")
    elif event.get("type") == "response.output_text.delta":
        text = event["delta"]
    elif event.get("type") == "content_block_delta":
        text = event["delta"].get("text")
    else:
        text = event.get("text_output")
    return text or ""


_GRPC_READERS = {"service": _read_service, "triton": _read_triton}
