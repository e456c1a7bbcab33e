"""The messages of ``trtllm_service.proto``, from its compiled descriptor.

Generated code would bind the package to one range of protobuf releases, and the published stubs
(``smg-grpc-proto``) need a newer one than tritonclient allows. A descriptor is read by all of them.
`make generate` compiles it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DESCRIPTOR = Path(__file__).with_name("trtllm_service.binpb")  # FileDescriptorSet of one file
_PACKAGE = "trtllm"
SERVICE = f"/{_PACKAGE}.TrtllmService/"

(_file,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR.read_bytes()).file
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_file.SerializeToString())
MESSAGES: dict[str, Any] = {
    name.removeprefix(f"{_PACKAGE}."): made
    for name, made in message_factory.GetMessageClassesForFiles([_file.name], _pool).items()
}


def __getattr__(name: str) -> Any:
    """Each message by its name, as a class of this module."""
    try:
        return MESSAGES[name]
    except KeyError:
        raise AttributeError(name) from None
