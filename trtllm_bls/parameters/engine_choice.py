"""The text that names an engine: ``triton:MODEL``, ``triton+grpc://…`` or ``trtllm://…``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_bls.parameters.declaration import Kind


class EngineKind(str, Enum):
    """What kind of engine it is; the value is how its text begins."""

    TRITON = "triton:"  # a model of this server
    TRITON_GRPC = "triton+grpc://"  # the same model of other servers
    TRTLLM = "trtllm://"  # TensorRT-LLM's own gRPC service


@dataclass(frozen=True)
class EngineChoice:
    """``addresses`` are (``host:port``, model) of each server.

    The address is empty for a model of this server, the model for TensorRT-LLM's service.
    """

    kind: EngineKind
    addresses: tuple[tuple[str, str], ...]

    @property
    def is_elsewhere(self) -> bool:
        """Whether no model of this server is needed."""
        return self.kind is not EngineKind.TRITON


def parse_engine(text: str) -> EngineChoice:
    """Read the text of a choice; raises ``ValueError`` for any other form.

    With several addresses of ``triton+grpc``, those that name no model have the first one's.
    """
    kind = next((each for each in EngineKind if text.startswith(each.value)), None)
    if kind is None:
        raise ValueError(text)
    rest = text.removeprefix(kind.value)
    if kind is EngineKind.TRITON:
        if not rest or "/" in rest or "," in rest:
            raise ValueError(text)
        return EngineChoice(kind, (("", rest),))
    addresses: list[tuple[str, str]] = []
    for part in rest.rstrip("/").split(","):
        address, _, model = part.strip().partition("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or "/" in model:
            raise ValueError(text)
        model = model or (addresses[0][1] if addresses else "")
        if bool(model) != (kind is EngineKind.TRITON_GRPC):
            raise ValueError(text)
        addresses.append((address, model))
    return EngineChoice(kind, tuple(addresses))


def _local(text: str) -> str:
    """What generates tokens inside the Python model ``tensorrt_llm``."""
    if text not in ("embedded", "llm_api"):
        choice = parse_engine(text)
        if choice.kind is not EngineKind.TRTLLM or len(choice.addresses) > 1:
            raise ValueError(text)
    return text


LOCAL_ENGINE = Kind("embedded, llm_api or trtllm://HOST:PORT", _local)
ENGINE = Kind(
    "triton:MODEL, triton+grpc://HOST:PORT/MODEL or trtllm://HOST:PORT (several with commas)",
    parse_engine,
)
