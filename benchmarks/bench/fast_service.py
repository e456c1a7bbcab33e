"""TrtllmService in one process that is no bottleneck: 50,000 tokens/s and more on one core.

grpcio in Python gives about 6,000 tokens/s, so a replica's one engine would be what is measured.
Here each step writes the tokens of all streams of a connection at once, framed as in ``http2``.
It serves what a plain stream needs, to clients that keep to the protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpack import Decoder

from trtllm_bls.engines.trtllm_service.service_messages import MESSAGES, SERVICE
from trtllm_bls.wire.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    RESET,
    SETTINGS,
    UPDATE,
    frame,
    number_frame,
    packed_headers,
)

_PREFACE_BYTES, _FRAME_BYTES = 24, FRAME_HEADER.size
_WINDOW, _WINDOW_UPDATE = (1 << 16) - 1, 1 << 20
_WINDOWS = ((0x3, 1 << 16), (0x4, 1 << 22))  # streams at once, and the window of each
_HEAD = packed_headers([(b":status", b"200"), (b"content-type", b"application/grpc")])
_OK, _UNKNOWN = packed_headers([(b"grpc-status", b"0")]), packed_headers([(b"grpc-status", b"12")])
_Chunk, _Complete = MESSAGES["GenerateStreamChunk"], MESSAGES["GenerateComplete"]


@dataclass
class Stream:
    """An answer that says ``ids`` over and over: ``sent`` of ``length`` tokens so far."""

    peer: _Peer
    id: int
    request_id: str
    ids: tuple[int, ...]
    length: int
    sent: int = 0

    def next(self) -> bytes:
        """The frames of the next token; with the last one the answer ends."""
        self.sent += 1
        token = self.ids[(self.sent - 1) % len(self.ids)]
        figures = {"prompt_tokens": len(self.ids), "completion_tokens": self.sent}
        frames = b"" if self.sent > 1 else frame(HEADERS, END_HEADERS, self.id, _HEAD)
        frames += self._message(chunk=_Chunk(token_ids=[token], **figures))
        if self.sent == self.length:
            repeated = (self.ids * (self.length // len(self.ids) + 1))[: self.length]
            complete = _Complete(output_token_ids=repeated, finish_reason="length", **figures)
            frames += self._message(complete=complete) + _end(self.id)
        return frames

    def _message(self, **part: Any) -> bytes:
        message = MESSAGES["GenerateResponse"](request_id=self.request_id, **part)
        return _data(self.id, message)


class FastService:
    """Gives every stream a token each ``step_s``: of ``says``, or else of its prompt.

    ``answers`` are its replies to unary calls.
    """

    def __init__(self, step_s: float, answers: dict[str, Any], says: tuple[int, ...]) -> None:
        self.answers, self.says = answers, says
        self.running: dict[tuple[_Peer, int], Stream] = {}
        self._step_s = step_s
        self._due = 0.0

    async def start(self) -> int:
        """Listen on any port of this machine; the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Peer(self), "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def add(self, stream: Stream) -> None:
        """Its first token comes with the next step."""
        if not self.running:
            self._due = asyncio.get_running_loop().time()
            self._again()
        self.running[stream.peer, stream.id] = stream

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due + self._step_s, loop.time())
        loop.call_at(self._due, self._step)

    def _step(self) -> None:
        frames: dict[_Peer, list[bytes]] = {}
        for key, stream in list(self.running.items()):
            frames.setdefault(stream.peer, []).append(stream.next())
            if stream.sent == stream.length:
                del self.running[key]
        for peer, parts in frames.items():
            peer.send(*parts)
        if self.running:
            self._again()


class _Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, service: FastService) -> None:
        self._service = service
        self._transport: Any = None
        self._decoder = Decoder()
        self._received = bytearray()
        self._to_skip = _PREFACE_BYTES
        self._calls: dict[int, tuple[str, bytearray]] = {}
        self._window, self._held = _WINDOW, deque[bytes]()
        self._since_update = 0
        self._handlers: dict[int, Callable[[int, int, bytes], None]] = {
            HEADERS: self._on_headers,
            DATA: self._on_data,
            SETTINGS: self._on_settings,
            PING: self._on_ping,
            UPDATE: self._on_update,
            RESET: self._on_reset,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        windows = b"".join(
            key.to_bytes(2, "big") + size.to_bytes(4, "big") for key, size in _WINDOWS
        )
        self._transport.write(frame(SETTINGS, 0, 0, windows) + number_frame(UPDATE, 0, 1 << 30))

    def connection_lost(self, exc: Exception | None) -> None:
        for key in [key for key in self._service.running if key[0] is self]:
            del self._service.running[key]

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < self._to_skip + _FRAME_BYTES:
            return
        start, self._to_skip = self._to_skip, 0
        while len(self._received) - start >= _FRAME_BYTES:
            high, low, kind, flags, stream_id = FRAME_HEADER.unpack_from(self._received, start)
            end = start + _FRAME_BYTES + (high << 8 | low)
            if end > len(self._received):
                break
            if kind in self._handlers:
                self._handlers[kind](flags, stream_id, bytes(self._received[start + 9 : end]))
            start = end
        del self._received[:start]

    def send(self, *frames: bytes) -> None:
        """Write frames, as far as the client takes them now.

        Frame headers are counted, too, so that less is sent than the client allows.
        """
        self._held.extend(frames)
        while self._held and len(self._held[0]) <= self._window:
            self._window -= len(self._held[0])
            self._transport.write(self._held.popleft())

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        begin = 1 if flags & PADDED else 0
        end = len(payload) - (payload[0] if flags & PADDED else 0)
        block = payload[begin + (5 if flags & PRIORITY else 0) : end]
        headers = dict(self._decoder.decode(block, raw=True))
        if b":path" in headers:
            self._calls[stream_id] = headers[b":path"].decode(), bytearray()

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._since_update += len(payload)
        if self._since_update > _WINDOW_UPDATE:
            self._transport.write(number_frame(UPDATE, 0, self._since_update))
            self._since_update = 0
        if (call := self._calls.get(stream_id)) is None:
            return
        path, body = call
        body += payload
        if flags & END_STREAM:
            del self._calls[stream_id]
            self._answer(stream_id, path.removeprefix(SERVICE), bytes(body[5:]))

    def _answer(self, stream_id: int, method: str, body: bytes) -> None:
        if method in self._service.answers:
            head = frame(HEADERS, END_HEADERS, stream_id, _HEAD)
            self.send(head, _data(stream_id, self._service.answers[method]), _end(stream_id))
            return
        if method != "Generate":
            self.send(frame(HEADERS, END_HEADERS, stream_id, _HEAD), _end(stream_id, _UNKNOWN))
            return
        request = MESSAGES["GenerateRequest"].FromString(body)
        ids = self._service.says or tuple(request.tokenized.input_token_ids)
        self._service.add(Stream(self, stream_id, request.request_id, ids, request.max_tokens))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))

    def _on_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            self._window += int.from_bytes(payload, "big")
            self.send()

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._calls.pop(stream_id, None)
        self._service.running.pop((self, stream_id), None)


def _data(stream_id: int, message: Any) -> bytes:
    body = message.SerializeToString()
    return frame(DATA, 0, stream_id, b"\0" + len(body).to_bytes(4, "big") + body)


def _end(stream_id: int, status: bytes = _OK) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, status)
