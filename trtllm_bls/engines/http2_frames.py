"""HTTP/2 frames as bytes: what ``http2_connection`` reads and writes of streams itself."""

from __future__ import annotations

import struct

from h2.exceptions import ProtocolError
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple

DATA, HEADERS, RESET, SETTINGS, GOAWAY, UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x7, 0x8, 0x9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 0x1, 0x4, 0x8, 0x20
MAX_HEADERS_BYTES = 1 << 16  # of one block, packed or not

FRAME_HEADER = struct.Struct(">HBBBI")  # length (upper 16 bits, lower 8), type, flags, stream
_NUMBER = struct.Struct(">I")

Fields = dict[bytes, bytes]


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """A whole frame."""
    size = len(payload)
    return FRAME_HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """A frame of one number: the increment of a window, the code of a reset."""
    return frame(kind, 0, stream_id, _NUMBER.pack(number))


def number_of(payload: bytes) -> int:
    """The number in such a frame. Raises ``ProtocolError``."""
    if len(payload) != _NUMBER.size:
        raise ProtocolError(f"a frame of {len(payload)} bytes that holds one number")
    return int(_NUMBER.unpack(payload)[0])


def unpadded(payload: bytes, flags: int) -> bytes:
    """Without padding and priority. Raises ``ProtocolError``."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - payload[0] if payload else -1
    if flags & PRIORITY:
        begin += 5
    if begin > end:
        raise ProtocolError("a frame with more padding than it has room for")
    return payload[begin:end]


def packed_headers(fields: list[tuple[bytes, bytes]]) -> bytes:
    """A header block that is right at any time: its fields are never put in the peer's table."""
    block: bytes = Encoder().encode([NeverIndexedHeaderTuple(*field) for field in fields])
    return block


class HeaderBlocks:
    """The header blocks of one connection, which may come in several frames."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_HEADERS_BYTES)
        self._parts = b""
        self._ended = False
        self.open_on: int | None = None  # the stream whose block is to be continued

    def add(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Fields | None:
        """The fields, once all parts have come. Raises ``ProtocolError``.

        To be called for every stream, those that are over included: the table is shared.
        """
        if kind == HEADERS:
            self._parts, self._ended = unpadded(payload, flags), bool(flags & END_STREAM)
        elif stream_id != self.open_on:
            raise ProtocolError("a CONTINUATION without HEADERS")
        else:
            self._parts += payload
        if len(self._parts) > MAX_HEADERS_BYTES:
            raise ProtocolError(f"headers of more than {MAX_HEADERS_BYTES} bytes")
        if not flags & END_HEADERS:
            self.open_on = stream_id
            return None
        self.open_on = None
        try:
            fields = self._decoder.decode(self._parts, raw=True)
        except HPACKError as error:
            raise ProtocolError(f"headers that cannot be read: {error}") from error
        return {bytes(name): bytes(value) for name, value in fields}

    @property
    def ended(self) -> bool:
        """Whether the stream ends with the block that was returned last."""
        return self._ended
