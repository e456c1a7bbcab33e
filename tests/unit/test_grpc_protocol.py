"""Frames of HTTP/2 as another implementation makes and reads them."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame, RstStreamFrame

from trtllm_bls.grpc_client.protocol import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADERS,
    MAX_HEADERS_BYTES,
    RESET,
    HeaderBlocks,
    ProtocolError,
    number_frame,
    number_of,
    packed_headers,
)

FIELDS = [(b":status", b"200"), (b"grpc-status", b"0"), (b"grpc-message", b"all is well")]


def parts(frame: Frame) -> tuple[int, int, int, bytes]:
    """Kind, flags, stream and payload."""
    data = frame.serialize()
    _, _, kind, flags, stream = FRAME_HEADER.unpack_from(data)
    return kind, flags, stream, data[FRAME_HEADER.size :]


@pytest.mark.parametrize("flags", [[], ["PADDED"], ["PRIORITY"], ["PADDED", "PRIORITY"]])
def test_headers_are_read_padded_cut_and_after_others(flags: list[str]) -> None:
    """Padding and priority are left out, parts are joined, the table is kept between blocks."""
    blocks, encoder = HeaderBlocks(), Encoder()
    for stream in (1, 3, 5):
        block = encoder.encode(FIELDS)
        first = HeadersFrame(stream, block[:3], flags=[*flags, "END_STREAM"])
        first.pad_length = 7 if "PADDED" in flags else 0
        middle = ContinuationFrame(stream, block[3:5])
        last = ContinuationFrame(stream, block[5:], flags=["END_HEADERS"])
        assert blocks.add(*parts(first)) is None and blocks.open_on == stream
        assert blocks.add(*parts(middle)) is None
        assert blocks.add(*parts(last)) == dict(FIELDS)
        assert blocks.ended and blocks.open_on is None


@pytest.mark.parametrize(
    "kind, flags, payload",
    [
        (CONTINUATION, END_HEADERS, b""),  # of nothing
        (HEADERS, END_HEADERS, b"\x00" * (MAX_HEADERS_BYTES + 1)),
        (HEADERS, END_HEADERS, b"\xff\xff\xff\xff\xff\xff\xff"),  # no HPACK
        (HEADERS, END_HEADERS | 0x8, b""),  # padded, without a length
        (HEADERS, END_HEADERS | 0x8, b"\x09abc"),  # more padding than there is
        (HEADERS, END_HEADERS | 0x20, b"abc"),  # half a priority
    ],
)
def test_broken_headers_are_refused(kind: int, flags: int, payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        HeaderBlocks().add(kind, flags | END_STREAM, 1, payload)


def test_packed_headers_are_right_whatever_the_peer_has_read_before() -> None:
    """They enter no table: the same bytes can be sent for every call."""
    packed, decoder = packed_headers(FIELDS), Decoder()
    before = Encoder().encode([(b"other", b"field")])
    for _ in range(3):
        assert [(bytes(k), bytes(v)) for k, v in decoder.decode(packed, raw=True)] == FIELDS
        decoder.decode(before)


def test_a_frame_of_a_number_is_read_elsewhere_and_a_short_one_refused() -> None:
    reset, size = Frame.parse_frame_header(memoryview(number_frame(RESET, 7, 8)[:9]))
    reset.parse_body(memoryview(number_frame(RESET, 7, 8)[9:]))
    assert isinstance(reset, RstStreamFrame) and size == 4
    assert (reset.stream_id, reset.error_code) == (7, 8)
    with pytest.raises(ProtocolError):
        number_of(b"abc")
