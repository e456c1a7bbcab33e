"""The requests that port 8000 answers: a table, of which docs/security.md and tests are made.

A path is matched as the client sent it, byte by byte, and the matched bytes are forwarded. So no
spelling of a path means one thing here and another in Triton. Triton decodes no percent sign in a
path; a path with one matches no row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from trtllm_bls.http.limits import JSON, OCTETS, UNNAMED, Refused

_MODEL_NAME = r"(?!\.{1,2}(?:/|$))[\w.@+=,:~-]+"  # no dot segment
_PATH_PLACES = {"{model}": rf"({_MODEL_NAME})(?:/versions/([0-9]{{1,18}}))?", "{name}": _MODEL_NAME}


@dataclass(frozen=True)
class Route:
    """A row of the table. In ``path``, ``{model}`` is NAME or NAME/versions/N.

    ``body``: media types of the body; empty: a request has none. ``by_grpc``: this program calls
    the model over gRPC; else Triton's own HTTP port answers. ``headers``: the client's headers that
    are forwarded to Triton, and no others are. ``keyless``: answered without a key, also under
    ``--http-keys``. ``control``: answered only with ``--open-control-apis``. ``tensors``: refused
    under ``--triton-infer off``.
    """

    method: str
    path: str
    body: tuple[bytes, ...] = ()
    by_grpc: bool = False
    headers: tuple[bytes, ...] = ()
    keyless: bool = False
    control: bool = False
    tensors: bool = False
    pattern: re.Pattern[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pattern = self.path
        for place, names in _PATH_PLACES.items():
            pattern = pattern.replace(place, names)
        object.__setattr__(self, "pattern", re.compile(pattern.encode()))


TRACE = b"traceparent"
JSON_LENGTH = b"inference-header-content-length"  # bytes of the JSON that binary tensors follow
_TENSOR_TYPES = (JSON, OCTETS, UNNAMED)  # Triton's published client names no type
_SETTINGS = (JSON, UNNAMED)

# APIs that change the server, or the answers that other clients get.
_CONTROL_READS = (
    *("logging", "trace/setting", "models/{model}/trace/setting"),
    *("systemsharedmemory/status", "systemsharedmemory/region/{name}/status"),
    *("cudasharedmemory/status", "cudasharedmemory/region/{name}/status"),
)
_CONTROL_WRITES = (
    *("logging", "trace/setting", "models/{model}/trace/setting", "repository/index"),
    *("repository/models/{name}/load", "repository/models/{name}/unload"),
    *("systemsharedmemory/region/{name}/register", "systemsharedmemory/region/{name}/unregister"),
    *("systemsharedmemory/unregister", "cudasharedmemory/unregister"),
    *("cudasharedmemory/region/{name}/register", "cudasharedmemory/region/{name}/unregister"),
)

ROUTES = (
    Route("GET", "/v2/health/live", keyless=True),
    Route("GET", "/v2/health/ready", keyless=True),
    Route("GET", "/v2"),
    Route("GET", "/v2/models/stats"),
    Route("GET", "/v2/models/{model}"),
    Route("GET", "/v2/models/{model}/ready"),
    Route("GET", "/v2/models/{model}/config"),
    Route("GET", "/v2/models/{model}/stats"),
    Route("POST", "/v2/models/{model}/generate", (JSON,), by_grpc=True, headers=(TRACE,)),
    Route("POST", "/v2/models/{model}/generate_stream", (JSON,), by_grpc=True, headers=(TRACE,)),
    Route(
        "POST",
        "/v2/models/{model}/infer",
        _TENSOR_TYPES,
        headers=(TRACE, JSON_LENGTH),
        tensors=True,
    ),
    *(Route("GET", f"/v2/{path}", control=True) for path in _CONTROL_READS),
    *(Route("POST", f"/v2/{path}", _SETTINGS, control=True) for path in _CONTROL_WRITES),
)


def match_route(
    method: str, path: bytes, has_key: bool, opens_control: bool, opens_infer: bool = True
) -> tuple[Route, re.Match[bytes]]:
    """Return the route that answers a request, and its match of ``path``. Raises ``Refused``."""
    matches: dict[str, tuple[Route, re.Match[bytes]]] = {}  # by method
    for row in ROUTES:
        match = row.pattern.fullmatch(path)
        if match is not None:
            matches.setdefault(row.method, (row, match))
    route, _ = matches.get(method, (None, None))
    if not has_key and not (route and route.keyless):
        problem = "no valid API key; send Authorization: Bearer KEY"
        raise Refused(401, problem, {"www-authenticate": "Bearer"})
    if not matches:
        raise Refused(404, "nothing is served at this path; docs/security.md has those that are")
    if route is None:
        allowed = ", ".join(sorted(matches))
        raise Refused(405, f"this path takes {allowed}, not {method}", {"allow": allowed})
    if route.control and not opens_control:
        raise Refused(403, "this API is closed; serve --open-control-apis opens it")
    if route.tensors and not opens_infer:
        raise Refused(403, "infer is closed; serve --triton-infer on opens it")
    return matches[method]
