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


def _classes() -> dict[str, Any]:
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTOR.read_bytes()).file
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{_PACKAGE}."): made for name, made in found.items()}


MESSAGES = _classes()


def __getattr__(name: str) -> Any:
    """Each message by its name, as a class of this module."""
    try:
        return MESSAGES[name]
    except KeyError:
        raise AttributeError(name) from None
