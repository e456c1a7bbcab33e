"""How a gRPC call ends: its status, read from the headers of an HTTP/2 response."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

# By code, as in gRPC's table of statuses.
_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
    *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
    *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
    "UNAUTHENTICATED",
)
_STATUSES = {b"%d" % code: name for code, name in enumerate(_NAMES)}


class GrpcError(Exception):
    """A call ended with a status other than OK: its name (``"UNAVAILABLE"``) and the details."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status
        self.details = details


def status_of(trailers: Mapping[bytes, bytes]) -> GrpcError | None:
    """The status in a response's last headers; ``None`` for OK."""
    code = trailers.get(b"grpc-status")
    if code is None:
        return not_grpc(trailers) or GrpcError("UNKNOWN", "the call ended without a grpc-status")
    details = unquote_to_bytes(trailers.get(b"grpc-message", b"")).decode("utf-8", "replace")
    return None if code == b"0" else GrpcError(_STATUSES.get(code, "UNKNOWN"), details)


def not_grpc(headers: Mapping[bytes, bytes]) -> GrpcError | None:
    """Why a response with these first headers is no gRPC response; ``None`` if it is one."""
    status = headers.get(b":status", b"200")
    kind = headers.get(b"content-type", b"application/grpc")
    if status != b"200":
        passing = status in (b"429", b"502", b"503", b"504")
        details = f"HTTP status {status.decode('latin-1')}"
        return GrpcError("UNAVAILABLE" if passing else "UNKNOWN", details)
    if not kind.startswith(b"application/grpc"):
        return GrpcError("UNKNOWN", f"not gRPC: content-type is {kind.decode('latin-1')}")
    return None
