"""The messages of ``trtllm_service.proto``, from its compiled descriptor.

Generated code would bind the package to one range of protobuf releases, and the published stubs
(``smg-grpc-proto``) need a newer one than tritonclient allows. A descriptor is read by all of them.
`make generate` compiles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTOR = Path(__file__).with_name("trtllm_service.binpb")  # FileDescriptorSet of one file
_PROTO_PACKAGE = "trtllm"
_MANY_IDS = 4096  # ids, below which numpy gains nothing
SERVICE = f"/{_PROTO_PACKAGE}.TrtllmService/"

(_file,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR.read_bytes()).file
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file.SerializeToString())
MESSAGES: dict[str, Any] = {}
for _name, _class in message_factory.GetMessageClassesForFiles([_file.name], _pool).items():
    MESSAGES[_name.removeprefix(f"{_PROTO_PACKAGE}.")] = _class


def __getattr__(name: str) -> Any:
    """Return a message by its name, as a class of this module."""
    try:
        return MESSAGES[name]
    except KeyError:
        raise AttributeError(name) from None


def packed_request(message: Any, ids: Sequence[int]) -> bytes:
    """Serialise the request ``message`` with the ids of its prompt."""
    if len(ids) < _MANY_IDS:
        message.tokenized.input_token_ids.extend(ids)
        return bytes(message.SerializeToString())
    # ``extend`` makes an object of each id, and protobuf would then write each. To protobuf, two
    # parts of a message in a row are one.
    tokenized = message.DESCRIPTOR.fields_by_name["tokenized"]
    numbers = _varints(ids)
    field = _field(tokenized.message_type.fields_by_name["input_token_ids"].number, numbers)
    return bytes(message.SerializeToString()) + _field(tokenized.number, field)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varints([len(content)]) + content


def _varints(numbers: Sequence[int]) -> bytes:
    """Pack numbers as protobuf does: seven bits a byte, the lowest first.

    Each takes as many bytes as the largest needs, which every reader accepts.
    """
    values = np.asarray(numbers, np.int32)
    places = -(-max(1, int(values.max()).bit_length()) // 7)
    packed = np.empty((len(values), places), np.uint8)
    for place in range(places):
        packed[:, place] = values >> 7 * place & 127
        if place < places - 1:
            packed[:, place] |= 128  # another byte follows
    return packed.tobytes()
