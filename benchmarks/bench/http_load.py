"""Load over HTTP by a client of our own, in several processes: completions streamed as events.

While a load runs, each read of a socket costs its HTTP parsing and a time; events are read once
all answers have ended. ``direct`` asks the engine's gRPC in the same way, without HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import time
from typing import Any

import httptools
import uvloop

from bench.answers import Answer, Request
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.wire.grpc_client import GrpcChannel

START_DELAY_S = 0.5  # until all processes have got their share
_HEALTH_CONNECTIONS, _HEALTH_EVERY_S = 8, 0.0015
_HEALTH_DELAY_S = 2.0  # until the first requests, which come all at once, have begun


class HttpLoad:
    """``processes`` Python processes that share the streams."""

    def __init__(self, processes: int) -> None:
        self.name = f"own client, {processes} processes"
        self._processes = processes
        self._pool = multiprocessing.get_context("spawn").Pool(processes + 1)

    def ask(self, port: int, model: str, plan: list[list[Request]]) -> list[Answer]:
        """Every stream asks its requests one after the other, over one connection."""
        return self._run(_http_stream, [port], model, plan)

    def direct(self, ports: list[int], plan: list[list[Request]]) -> list[Answer]:
        """The same of TrtllmServices, in turn; requests have ids."""
        return self._run(_grpc_stream, ports, "", plan)

    def health(self, port: int, seconds: float) -> Any:
        """Ask for ``/health`` again and again: (status, ms) of each by ``get()``."""
        return self._pool.apply_async(_health, (port, seconds))

    def close(self) -> None:
        self._pool.terminate()

    def _run(self, ask: Any, ports: list[int], model: str, plan: list[list[Request]]) -> Any:
        begin = time.time() + START_DELAY_S
        shares = [plan[n :: self._processes] for n in range(self._processes)]
        work = [(ask, ports, model, share, begin) for share in shares if share]
        return list(itertools.chain(*self._pool.starmap(_share, work, chunksize=1)))


def _share(
    ask: Any, ports: list[int], model: str, plan: list[list[Request]], begin: float
) -> list[Answer]:
    async def run() -> list[Answer]:
        turns = itertools.cycle([(port, GrpcChannel(f"127.0.0.1:{port}")) for port in ports])
        running = [ask(*next(turns), model, requests, begin) for requests in plan]
        return list(itertools.chain(*await asyncio.gather(*running)))

    answers = uvloop.run(run())
    for answer in answers:
        _read_events(answer)
        answer.check()
    return answers


class _Client(asyncio.Protocol):
    """One connection: bodies with their times."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.bodies: list[bytes] = []
        self.done: asyncio.Future[int] | None = None
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
        if self.done is not None and not self.done.done():
            self.done.set_result(status)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(0)

    async def ask(self, request: bytes) -> int:
        """The reply's status; 0 if the connection was lost."""
        self.times, self.bodies = [], []
        self.done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self.done


async def connected(port: int) -> _Client:
    _, client = await asyncio.get_running_loop().create_connection(_Client, "127.0.0.1", port)
    return client


async def _http_stream(
    port: int, _: object, model: str, requests: list[Request], begin: float
) -> list[Answer]:
    client = await connected(port)
    await asyncio.sleep(begin - time.time())
    answers = []
    for request in requests:
        fields = {"model": model, "prompt": request.inputs["text_input"][0], "stream": True}
        fields |= {"max_tokens": request.inputs["max_tokens"][0], "temperature": 0}
        if "add_special_tokens" in request.inputs:
            fields["add_special_tokens"] = request.inputs["add_special_tokens"][0]
        body = json.dumps(fields | {"ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        answer = Answer(request, time.time_ns(), [], [])
        status = await client.ask(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer.arrived, answer.raw = client.times, client.bodies
        if status != 200:
            text = b"".join(client.bodies)[:200].decode(errors="replace")
            answer.problem = f"HTTP status {status}: {text}"
        answers.append(answer)
        if not status:
            client = await connected(port)
    return answers


def _read_events(answer: Answer) -> None:
    """One part per event with text; an event is there when its last byte is."""
    bodies, answer.raw = answer.raw, None
    if bodies is None or answer.problem is not None:
        return
    times, rest, ended = [], b"", False
    for arrived, body in zip(answer.arrived, bodies, strict=True):
        *events, rest = (rest + body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                ended = True
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                answer.problem = str(chunk["error"])
            for choice in chunk.get("choices", ()):
                if choice["text"]:
                    times.append(arrived)
                    answer.parts.append(choice["text"])
    answer.arrived = times
    if not ended or rest:
        answer.problem = answer.problem or "the stream ended without [DONE]"


async def _grpc_stream(
    port: int, connection: GrpcChannel, _: str, requests: list[Request], begin: float
) -> list[Answer]:
    await asyncio.sleep(begin - time.time())
    answers = []
    for number, request in enumerate(requests):
        answer = Answer(request, time.time_ns(), [], [])
        await _generate(connection, answer, f"{port}-{id(requests)}-{number}")
        answers.append(answer)
    return answers


async def _generate(connection: GrpcChannel, answer: Answer, request_id: str) -> None:
    inputs, raw = answer.request.inputs, []
    message = messages.GenerateRequest(request_id=request_id, streaming=True, ignore_eos=True)
    message.tokenized.input_token_ids.extend(inputs["input_ids"])
    message.max_tokens = inputs["request_output_len"][0]
    message.sampling_config.top_k = 1
    done = asyncio.get_running_loop().create_future()

    def on_messages(arrived: list[bytes]) -> None:
        now = time.time_ns()
        raw.extend((now, each) for each in arrived)

    call = connection.open(messages.SERVICE + "Generate", on_messages, done.set_result)
    call.send(message.SerializeToString())
    call.half_close()
    error = await done
    answer.problem = None if error is None else str(error)
    for now, each in raw:
        for token in messages.GenerateResponse.FromString(each).chunk.token_ids:
            answer.arrived.append(now)
            answer.parts.append(f"{token} ")


def _health(port: int, seconds: float) -> list[tuple[int, float]]:
    async def ask(found: list[tuple[int, float]], end: float) -> None:
        client = await connected(port)
        while time.time() < end:
            began = time.perf_counter()
            status = await client.ask(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            found.append((status, (time.perf_counter() - began) * 1e3))
            if not status:
                client = await connected(port)
            await asyncio.sleep(_HEALTH_EVERY_S)

    async def run() -> list[tuple[int, float]]:
        found: list[tuple[int, float]] = []
        await asyncio.sleep(_HEALTH_DELAY_S)
        end = time.time() + seconds
        await asyncio.gather(*(ask(found, end) for _ in range(_HEALTH_CONNECTIONS)))
        return found

    return uvloop.run(run())
