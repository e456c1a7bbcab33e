"""An HTTP exchange: the response to a client, and the text requests that produce it.

The text requests end when the client disconnects. No thread and no token queue stands between
them and the client: while it does not read, tokens wait in the engine's stream, and are later sent
as one event.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trtllm_bls.errors import CancelCause, TrtllmBlsError
from trtllm_bls.http.limits import RESPONSE_WRITER, ClientGone, ResponseWriter, header
from trtllm_bls.openai.api_errors import ApiError
from trtllm_bls.openai.builder import ResponseBuilder
from trtllm_bls.openai.messages import PATH, error_answer
from trtllm_bls.orchestrator.orchestrator import Orchestrator, TextSink, run_rows
from trtllm_bls.types import TextChunk, TextRequest

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_STREAM = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer the events
)


# A function that sends the chunks of one request to a sink, as ``Orchestrator.run`` does.
Run: TypeAlias = Callable[[TextRequest, TextSink, Callable[[int], None]], Coroutine[Any, Any, None]]


class Reply:
    """The response to one request: one JSON body, or server-sent events.

    ``json``, ``error`` and ``events`` wait while the client does not read. ``put`` never waits:
    events that cannot be written at once are left to a task, and ``ready`` waits for this task.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.request_id = header(scope, b"x-request-id")
        if not _REQUEST_ID.fullmatch(self.request_id):
            self.request_id = uuid.uuid4().hex.encode()
        self.is_started = False  # True once the headers are sent, or the first events collected
        self.stream_type = _EVENT_STREAM  # the content type of what ``events`` sends
        self.num_puts = 0
        self.path: str = scope["path"]
        self._for_anthropic = self.path.startswith(PATH)
        self._send = send
        # The writer refers to the scope. Without ``pop`` this reference cycle would keep the
        # request alive until the garbage collector runs.
        self._writer: ResponseWriter | None = scope.pop(RESPONSE_WRITER, None)
        # HTTP/1.0 has no chunked encoding, but uvicorn would use it all the same. So collect the
        # events for an HTTP/1.0 client, and send them at the end with a Content-Length.
        self._collected: list[bytes] | None = None
        if scope["http_version"] == "1.0":
            self._collected = []
        self._waiting: list[bytes] = []
        self._write_task: asyncio.Task[None] | None = None  # sends the waiting events

    async def json(
        self, body: Any, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send one JSON body. Bytes are sent as they are; any other value is encoded."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        length = (b"content-length", b"%d" % len(data))
        await self._start(status, [*headers, (b"content-type", b"application/json"), length])
        await self._send({"type": "http.response.body", "body": data})

    async def error(self, error: ApiError, response: ResponseBuilder | None = None) -> None:
        """Send the error as the response, or as the last event of ``response``'s started stream."""
        if self.is_started and response is not None:
            await self.events(response.failed(error), end=True)
        elif self._for_anthropic:
            status, error_object = error_answer(error)
            request_id = self.request_id.decode()
            body = {"type": "error", "error": error_object, "request_id": request_id}
            await self.json(body, status, error.header_pairs)
        else:
            await self.json(error.body, error.status, error.header_pairs)

    async def events(self, data: bytes, end: bool = False) -> None:
        """Send events, before the first of them the headers. ``end``: the response is complete."""
        if self._collected is not None:
            self.is_started = True
            self._collected.append(data)
            if not end:
                return
            data = b"".join(self._collected)
            length = (b"content-length", b"%d" % len(data))
            await self._start(200, [*_STREAM, (b"content-type", self.stream_type), length])
        elif not self.is_started:
            await self._start(200, [*_STREAM, (b"content-type", self.stream_type)])
        await self._send({"type": "http.response.body", "body": data, "more_body": not end})

    def put(self, events: bytes) -> None:
        """Write ``events``, or keep them until the client reads."""
        self.num_puts += 1
        if self._write_task is None and self._write(events):
            return
        self._waiting.append(events)
        if self._write_task is None:
            self._write_task = asyncio.create_task(self._send_waiting())

    def _write(self, events: bytes) -> bool:
        """Write ``events`` at once; return false if only a task can write them."""
        writer = self._writer
        if writer is None or self._collected is not None:
            return False
        if self.is_started:
            return writer.write(events)
        if not writer.is_ready:
            return False
        # Here ``events`` returns without suspending. In a task, the first events would be sent an
        # iteration of the event loop later, after those of every other stream.
        run_to_end(self.events(events))
        return True

    async def ready(self) -> None:
        """Return once all events that were put have been written."""
        while self._write_task is not None:
            await asyncio.wait({self._write_task})

    async def close(self) -> None:
        """Cancel the task that writes, if there is one."""
        if self._write_task is not None:
            self._write_task.cancel()
            await asyncio.wait({self._write_task})
            # A task cancelled before its first step never reaches its ``finally``.
            self._write_task = None

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                events = b"".join(self._waiting)
                self._waiting.clear()
                await self.events(events)
        finally:
            self._write_task = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        headers.append((b"x-request-id", self.request_id))
        if self._for_anthropic:
            headers.append((b"request-id", self.request_id))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that does not suspend. Raises ``RuntimeError`` if it does."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError(f"{work} suspends")


@dataclass
class PromptSink:
    """A ``TextSink`` for one prompt of a request.

    ``on_chunk`` gets each chunk with its choice's index. ``first_choice`` is the index of the
    prompt's first choice.
    """

    first_choice: int
    on_chunk: Callable[[int, TextChunk], None]
    ready: Callable[[], Coroutine[Any, Any, None]]

    def send(self, chunk: TextChunk) -> None:
        self.on_chunk(self.first_choice + chunk.sequence_index, chunk)


async def run_all(
    orchestrator: Orchestrator,
    requests: Sequence[TextRequest],
    on_chunk: Callable[[int, TextChunk], None],
    reply: Reply,
    receive: Receive,
    on_prompt: Callable[[int], None] = lambda tokens: None,
    run: Run | None = None,
) -> None:
    """Run the prompts of one HTTP request concurrently until all are answered and written.

    ``run`` runs each prompt; the default is ``orchestrator.run``. If one prompt fails, the others
    are cancelled. If ``receive`` reports a disconnect, all are cancelled.
    Raises ``ClientGone`` after a disconnect.
    """
    await run_for_client(
        _run_prompts(orchestrator, requests, on_chunk, reply, on_prompt, run), reply, receive
    )


async def run_for_client(
    running: Coroutine[Any, Any, None], reply: Reply, receive: Receive
) -> None:
    """Run the work of one HTTP request until it has ended and its events are written.

    If ``receive`` reports a disconnect, the work is cancelled. Raises ``ClientGone`` then.
    """
    work = asyncio.create_task(running)
    watcher = asyncio.create_task(_cancel_when_client_leaves(receive, work))
    try:
        await asyncio.wait({work})
        await reply.ready()
    finally:
        watcher.cancel()
        # The work still runs only if this task was cancelled, as the server does at shutdown.
        work.cancel(CancelCause.SHUTDOWN.value)
        await asyncio.wait({watcher, work})
        await reply.close()
    if work.cancelled():
        raise ClientGone
    work.result()


async def _run_prompts(
    orchestrator: Orchestrator,
    requests: Sequence[TextRequest],
    on_chunk: Callable[[int, TextChunk], None],
    reply: Reply,
    on_prompt: Callable[[int], None],
    run: Run | None,
) -> None:
    run_prompt = run or orchestrator.run
    if len(requests) > 1:
        # Hundreds of prompts take long to tokenise. On the event loop that would stall all streams.
        await asyncio.to_thread(orchestrator.prompts.encode_ahead, requests)
    turn = asyncio.Lock()

    async def ready() -> None:
        # An answer that is not streamed takes long to process. When those of all prompts arrive at
        # once, let other streams run after each.
        async with turn:
            await asyncio.sleep(0)
        await reply.ready()

    runs: list[Coroutine[Any, Any, None]] = []
    for index, request in enumerate(requests):
        sink_ready = reply.ready
        if len(requests) > 1 and not request.stream:
            sink_ready = ready
        sink = PromptSink(index * request.num_return_sequences, on_chunk, sink_ready)
        runs.append(run_prompt(request, sink, on_prompt))
    if len(runs) == 1:
        await runs[0]
    else:
        await run_rows([asyncio.create_task(run) for run in runs])


async def _cancel_when_client_leaves(receive: Receive, work: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel(CancelCause.CALLER_LEFT.value)


class JsonResponse(Response):
    """A Starlette response that sends JSON, or an ``ApiError``, through a ``Reply``."""

    def __init__(self, content: object) -> None:
        super().__init__()
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(scope, send)
        if isinstance(self._content, ApiError):
            await reply.error(self._content)
        else:
            await reply.json(self._content)


def tenant_of(scope: Scope) -> str:
    """Return who owns a request's stored responses: its API key's digest, empty without keys."""
    return scope.get("tenant") or ""


class RunningRequests:
    """The running requests of a process; implements ``lifecycle.Serving`` for draining.

    While ``refusal`` is set, ``one`` raises it for every new request.
    """

    loop: asyncio.AbstractEventLoop  # set when the application starts

    def __init__(self) -> None:
        self.refusal: TrtllmBlsError | None = None
        self.responses = 0  # text chunks that the orchestrator has sent
        self._running: dict[asyncio.Task[None], str] = {}

    @property
    def running(self) -> list[str]:
        """The ids of the running requests; any thread may read them."""
        return list(self._running.copy().values())  # ``copy`` is atomic under the GIL

    @contextmanager
    def one(self, request_id: str) -> Iterator[None]:
        """Register a request while the current task answers it. Raises ``refusal`` if it is set."""
        if self.refusal is not None:
            raise self.refusal
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request_id
        try:
            yield
        finally:
            del self._running[task]

    async def end_all(self) -> None:
        """Cancel every request with the error of a shutdown; return once all have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel(CancelCause.SHUTDOWN.value)
        if tasks:
            await asyncio.wait(tasks)
