"""What the fuzzer sends: requests to the five models, made from the contract and then spoiled.

A case is a finished message, or the bytes of a connection; nothing here talks to a server. Left
out, because no model sees them and no model can mend them (docs/security.md): the metadata
``triton_grpc_error``, over gRPC the parameter ``classification`` of an output, a batch of no rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from hpack import Encoder
from hypothesis import assume
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from trtllm_bls.wire.contract import (
    BLS,
    ENGINE,
    ENSEMBLE,
    MODELS,
    NUMPY_TYPES,
    POSTPROCESSING,
    PREPROCESSING,
    Model,
    Tensor,
)

TEXT = "one two three four"
BASES: dict[str, dict[str, Any]] = {
    BLS.name: {"text_input": [[TEXT]], "max_tokens": [[8]]},
    ENSEMBLE.name: {"text_input": [[TEXT]], "max_tokens": [[8]]},
    ENGINE.name: {"input_ids": [[5, 6, 7]], "input_lengths": [[3]], "request_output_len": [[8]]},
    PREPROCESSING.name: {"QUERY": [[TEXT]], "REQUEST_OUTPUT_LEN": [[8]]},
    POSTPROCESSING.name: {"TOKENS_BATCH": [[[5, 6, 7]]], "SEQUENCE_LENGTH": [[3]]},
}
SCALES = (1, 1, 1, 1, 10, 10, 100)
MAX_BYTES = 3_000_000  # of one input
STRINGS = (
    *(
        "",
        " ",
        "\0",
        "\n\r\n",
        "a\u0301",
        "👩‍👩‍👧",
        "\ufffd",
        "\u202e",
        "<|endoftext|>",
        "<s>",
        "</s>",
    ),
    *("{{7*7}}", "%s%n%x", "../../etc/passwd", "\x1b[2J\x1b]0;x\x07", "null", "NaN", "true"),
    '[{"role": "user", "content": "hi"}]',
    '[{"role": "system"}, {"role": 1, "content": []}]',
    *('{"type": "object"}', "(a+)+$", "json_schema", "regex", "ngram", "prediction", "\ud7ff"),
)
IDS = ("", "x", "../x", "a b", "x\n[error] forged", "\x1b[31m", "1/2", "0", "é" * 40, "i" * 5000)
FORMS = ("application/x-www-form-urlencoded", "application/jsonX", "", "text/plain", "*/*")
MANY_KEYS = {f"k{number}": 1 for number in range(50_000)}
_TYPES = {"STRING": "BYTES"}
_DATATYPES = (*NUMPY_TYPES, "BF16", "FP64", "INT8", "", "int32", "x" * 99)


@dataclass(frozen=True)
class Case:
    """One request: a gRPC message, the body of a POST to ``endpoint``, or frames of HTTP/2."""

    model: str
    endpoint: str  # stream, unary; generate, generate_stream, infer; frames; http, socket
    body: bytes
    content_type: str = "application/json"
    header_length: str | None = None

    def __repr__(self) -> str:
        shown = str(self.message)[:600] if self.over_grpc else repr(self.body[:600])
        return f"{self.model} {self.endpoint} {len(self.body)} bytes: {shown}"

    @property
    def over_grpc(self) -> bool:
        return self.endpoint in ("stream", "unary")

    @property
    def message(self) -> Any:
        return service_pb2.ModelInferRequest.FromString(self.body)


def _limits(kind: Any) -> st.SearchStrategy[int]:
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    edges = {0, 1, -1, 2, 3, 255, 256, 257, 32767, 65536, low, low + 1, high - 1, high}
    return st.sampled_from(sorted(edge for edge in edges if low <= edge <= high))


def element(dtype: str) -> st.SearchStrategy[Any]:
    """One value of a type, preferably one at an edge."""
    if dtype == "STRING":
        return st.sampled_from(STRINGS) | st.text(max_size=30) | st.binary(max_size=30)
    if dtype == "BOOL":
        return st.booleans()
    if dtype in ("FP16", "FP32"):
        odd = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, 6e4, float("nan"), float("inf"), -float("inf"))
        return st.sampled_from(odd) | st.floats(0, 2, width=16)
    return _limits(NUMPY_TYPES[dtype]) | st.integers(0, 20)


@st.composite
def values(draw: st.DrawFn, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A value of the right type, mostly of the right rank, with a batch dimension."""
    rows = draw(st.sampled_from((0, 2, 3, 9))) if draw(st.integers(0, 19)) == 0 else 1
    scale = draw(st.sampled_from(SCALES))
    size = draw(st.sampled_from((0, 1, 2, 7))) * scale
    dims = [each if each != -1 else size for each in tensor.dims]
    if draw(st.integers(0, 29)) == 0:
        dims = draw(st.sampled_from(([], [*dims, 1], [1, *dims], [0], [2, 3, 1])))
    count = int(np.prod([rows, *dims]))
    some = draw(st.lists(element(tensor.dtype), min_size=1, max_size=5))
    if tensor.dtype == "STRING" and count * scale < 5000:
        some = [each * scale * scale if len(each) < 40 else each for each in some]
    array = np.empty(len(some), NUMPY_TYPES[tensor.dtype])
    with np.errstate(over="ignore"):  # 1e38 is infinite as FP16
        array[:] = some
    return np.resize(array, (rows, *dims)) if count else np.empty((rows, *dims), array.dtype)


def packed(array: np.ndarray[Any, Any]) -> bytes:
    """As gRPC carries it."""
    if array.dtype != object:
        return array.tobytes()
    texts = [each if isinstance(each, bytes) else str(each).encode() for each in array.flat]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def base_fields(model: Model) -> dict[str, np.ndarray[Any, Any]]:
    """A request that the model answers."""
    named = model.input_named
    return {
        name: np.array(value, NUMPY_TYPES[named[name].dtype])
        for name, value in BASES[model.name].items()
    }


@st.composite
def _fields(draw: st.DrawFn, model: Model) -> dict[str, np.ndarray[Any, Any]]:
    fields = base_fields(model)
    for tensor in draw(st.lists(st.sampled_from(model.inputs), min_size=1, max_size=4)):
        fields[tensor.name] = draw(values(tensor))
    if (rows := draw(st.sampled_from((1,) * 9 + (2, 3, 8)))) > 1:
        fields = {name: np.concatenate([array] * rows) for name, array in fields.items()}
    if draw(st.integers(0, 9)) == 0:
        fields.pop(draw(st.sampled_from(sorted(fields))))
    return fields


@st.composite
def grpc_cases(draw: st.DrawFn, model: Model) -> Case:
    """A message whose fields may be odd, and whose form may be wrong as well."""
    fields = draw(_fields(model))
    message = service_pb2.ModelInferRequest(model_name=model.name)
    message.id = draw(st.sampled_from(IDS))
    parameters = message.parameters
    parameters["triton_enable_empty_final_response"].bool_param = True
    for name, array in fields.items():
        dtype = model.input_named[name].dtype
        message.inputs.add(name=name, datatype=_TYPES.get(dtype, dtype), shape=array.shape)
        message.raw_input_contents.append(packed(array)[:MAX_BYTES])
    if draw(st.booleans()):
        draw(st.sampled_from(_SPOILS))(draw, message, model)
    # Triton's Python backend drops a batch of no rows without a word, and its caller waits.
    assume(not message.inputs or any(tensor.shape[:1] != [0] for tensor in message.inputs))
    endpoint = "unary" if draw(st.integers(0, 19)) == 0 else "stream"
    return Case(model.name, endpoint, message.SerializeToString())


def _pick(draw: st.DrawFn, message: Any) -> int | None:
    return draw(st.integers(0, len(message.inputs) - 1)) if message.inputs else None


def _wrong_shape(draw: st.DrawFn, message: Any, model: Model) -> None:
    if (place := _pick(draw, message)) is not None:
        odd = st.sampled_from((-1, 0, 1, 2, 8, 9, 2**31, 2**40, 2**62))
        del message.inputs[place].shape[:]
        message.inputs[place].shape.extend(draw(st.lists(odd, max_size=5)))


def _wrong_type(draw: st.DrawFn, message: Any, model: Model) -> None:
    if (place := _pick(draw, message)) is not None:
        datatype = draw(st.sampled_from(_DATATYPES))
        message.inputs[place].datatype = _TYPES.get(datatype, datatype)


def _wrong_bytes(draw: st.DrawFn, message: Any, model: Model) -> None:
    if (place := _pick(draw, message)) is not None and message.raw_input_contents:
        raw = message.raw_input_contents[place % len(message.raw_input_contents)]
        edits = (raw[:-1], raw + b"\0", b"", b"\xff\xff\xff\xff" + raw[4:], raw * 2, b"\xff" * 8)
        message.raw_input_contents[place % len(message.raw_input_contents)] = draw(
            st.sampled_from(edits)
        )


def _twice(draw: st.DrawFn, message: Any, model: Model) -> None:
    if (place := _pick(draw, message)) is not None:
        message.inputs.add().CopyFrom(message.inputs[place])
        message.raw_input_contents.append(b"\0\0\0\0")


def _unknown(draw: st.DrawFn, message: Any, model: Model) -> None:
    for number in range(draw(st.sampled_from((1, 3, 30)))):
        message.inputs.add(name=draw(st.text(max_size=9)) + f"{number}", datatype="INT32")
        message.inputs[-1].shape.extend((1, 1))
        message.raw_input_contents.append(b"\1\0\0\0")


def _region(draw: st.DrawFn, message: Any, model: Model) -> None:
    if (place := _pick(draw, message)) is not None:
        given_in = message.inputs[place].parameters
        given_in["shared_memory_region"].string_param = draw(st.sampled_from(("x", "", "/dev/shm")))
        given_in["shared_memory_byte_size"].int64_param = draw(st.sampled_from((0, 4, -1, 2**62)))


def _outputs(draw: st.DrawFn, message: Any, model: Model) -> None:
    names = [tensor.name for tensor in model.outputs]
    for name in draw(st.lists(st.sampled_from([*names, "none such", ""]), max_size=6)):
        message.outputs.add(name=name)


def _parameter(draw: st.DrawFn, message: Any, model: Model) -> None:
    odd = ("sequence_id", "priority", "timeout", "sequence_start", "traceparent", "x" * 300)
    name = draw(st.sampled_from(odd))
    kind = draw(st.sampled_from(("int64_param", "string_param", "bool_param")))
    value = {"int64_param": -1, "string_param": "\n\x1b[31m", "bool_param": True}[kind]
    setattr(message.parameters[name], kind, value)


def _version(draw: st.DrawFn, message: Any, model: Model) -> None:
    message.model_version = draw(st.sampled_from(("2", "-1", "x", "9" * 400)))


_SPOILS = (
    *(_wrong_shape, _wrong_type, _wrong_bytes, _twice, _unknown, _region, _outputs, _parameter),
    _version,
)

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((0, 1, -1, 2**31, 2**32 + 5, 2**63, 2**64, 10**30, 1e400, 1.5, -0.0))
    | st.sampled_from(STRINGS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


_SIZES = st.sampled_from((0, 1, 4, -1, 2**28, 2**31, 2**32, 2**62, 2**63 - 1, 2**64, 1.0, "1"))
# Each quantity that an input of ``infer`` names, without regard to what is there.
_QUANTITIES = st.fixed_dictionaries(
    {},
    optional={
        "shape": st.lists(_SIZES, max_size=4) | st.just([1] * 1000),
        "data": _JSON,
        "parameters": st.fixed_dictionaries(
            {}, optional={"binary_data_size": _SIZES, "shared_memory_byte_size": _SIZES}
        ),
    },
)
_PROTOCOL = st.dictionaries(
    st.sampled_from(("priority", "timeout", "sequence_id", "sequence_start", "triton_x", "note")),
    _SIZES | st.booleans(),
)


@st.composite
def http_cases(draw: st.DrawFn, model: Model) -> Case:
    """A POST to ``generate``, ``generate_stream`` or ``infer``, whose JSON may be broken."""
    endpoint = draw(st.sampled_from(("generate", "generate_stream", "generate_stream", "infer")))
    header = None
    form = draw(st.sampled_from(("application/json",) * 20 + FORMS))
    if endpoint == "infer":
        document: dict[str, Any] = {"id": draw(st.sampled_from(IDS)), "inputs": []}
        for name, array in draw(_fields(model)).items():
            dtype = model.input_named[name].dtype
            row = {"name": name, "datatype": _TYPES.get(dtype, dtype), "shape": array.shape}
            if draw(st.integers(0, 29)) == 0:
                row[draw(st.sampled_from(sorted(row)))] = draw(_JSON)
            row["data"] = _plain(array)
            if draw(st.integers(0, 9)) == 0:
                row |= draw(_QUANTITIES)
            document["inputs"].append(row)
        if draw(st.integers(0, 9)) == 0:
            document["parameters"] = draw(_PROTOCOL)
        header = draw(st.sampled_from((None,) * 20 + ("0", "10", "-1", "x", "99999999999")))
    else:
        named = model.input_named
        document = {name: draw(_json(named.get(name))) for name in draw(_names(model))}
        for name, value in BASES[model.name].items():
            document.setdefault(name, value[0][0] if draw(st.booleans()) else value)
        scale = draw(st.sampled_from(SCALES))
        document |= {f"unknown{number}": "x" * scale for number in range(scale * 3)}
        document |= draw(st.sampled_from(({},) * 20 + (MANY_KEYS,)))
    return Case(model.name, endpoint, draw(_spelled(document)), form, header)


def _names(model: Model) -> st.SearchStrategy[list[str]]:
    names = [tensor.name for tensor in model.inputs] + ["id", "parameters"]
    return st.lists(st.sampled_from(names), max_size=4)


def _json(tensor: Tensor | None) -> st.SearchStrategy[Any]:
    if tensor is None:
        return _JSON
    typed = values(tensor).map(lambda array: _plain(array))
    return typed | typed.map(lambda row: row[0] if row else row) | _JSON


def _plain(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype == object:
        return [e.decode("latin-1") if isinstance(e, bytes) else e for e in array.flat]
    return array.ravel().tolist()


@st.composite
def _spelled(draw: st.DrawFn, document: dict[str, Any]) -> bytes:
    text = json.dumps(document)[:MAX_BYTES].encode()
    how = draw(st.integers(0, 39))
    if how == 0:
        return text[: draw(st.integers(0, len(text)))]
    if how == 1:
        return text[:-1] + b", " + text[1:]  # every key twice
    if how == 2:
        place = draw(st.integers(0, len(text)))
        return text[:place] + draw(st.binary(min_size=1, max_size=9)) + text[place:]
    if how == 3:
        depth = draw(st.sampled_from((10, 100, 1000, 200_000)))
        return b'{"text_input": ' + b"[" * depth + b"]" * depth + b"}"
    return text


# --- HTTP/2 as no client sends it -----------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
LAST_PING = b"the last"  # its answer shows that all before it was read
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
_SERVICE = "/inference.GRPCInferenceService/"
PATHS = (
    *(_SERVICE + name for name in ("ModelStreamInfer", "ModelInfer", "ServerReady", "ModelConfig")),
    *(_SERVICE + "RepositoryIndex", _SERVICE + "SystemSharedMemoryRegister", _SERVICE, "/", "*"),
    *("", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/" + "x" * 9000),
)
METADATA = (
    *(("grpc-timeout", value) for value in ("1n", "99999999H", "-1S", "x", "")),
    *(("grpc-encoding", value) for value in ("gzip", "deflate", "x")),
    *(("te", "gzip"), ("content-type", "application/grpc+json"), ("content-type", "text/plain")),
    *(("traceparent", "\xff"), ("traceparent", "x" * 20_000), (":path", "/"), ("host", "a")),
    *(("a-bin", "!!"), ("connection", "close"), ("content-length", "5"), ("A", "b"), ("", "")),
)


def frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


@st.composite
def _calls(draw: st.DrawFn, model: Model, stream: int) -> list[bytes]:
    """The frames of a call, whose metadata and messages are odd."""
    path = draw(st.sampled_from(PATHS[:2]) | st.sampled_from(PATHS))
    method = draw(st.sampled_from(("POST",) * 9 + ("GET", "PUT", "")))
    named = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x")]
    named += [("te", "trailers"), ("content-type", "application/grpc")]
    named += draw(st.lists(st.sampled_from(METADATA), max_size=2))
    block = Encoder().encode([(key.encode(), value.encode("latin-1")) for key, value in named])
    if draw(st.integers(0, 19)) == 0:
        block = draw(st.binary(max_size=40))
    cut = draw(st.sampled_from((len(block),) * 5 + (0, len(block) // 2)))
    frames = [frame(HEADERS, block[:cut], 4 * (cut == len(block)), stream)]
    if cut < len(block):
        frames.append(frame(CONTINUATION, block[cut:], 4, stream))
    body = draw(grpc_cases(model) if draw(st.booleans()) else st.none())
    message = body.body if body is not None else draw(st.binary(max_size=60))
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(message)))
        message = message[:at] + draw(st.binary(max_size=4)) + message[at + 2 :]
    size = draw(st.sampled_from((len(message),) * 9 + (0, len(message) + 9, 2**32 - 1)))
    packed_flag = draw(st.sampled_from((0,) * 9 + (1, 255)))
    sent = bytes((packed_flag,)) + size.to_bytes(4, "big") + message
    parts = [sent[at : at + 16_384] for at in range(0, len(sent), 16_384)]
    frames += [frame(DATA, part, int(part is parts[-1]), stream) for part in parts]
    return frames


_ODD_FRAMES = (
    *(frame(PING, b"12345678") * 200, frame(PING, b"short"), frame(PING, b"12345678", 1)),
    *(frame(SETTINGS, b"\0\4\0\0\0\0") * 200, frame(SETTINGS, b"\0\1\xff\xff\xff\xff" * 2000)),
    *(frame(SETTINGS, b"\0\5\0\0\0\0"), frame(SETTINGS, b"x"), frame(SETTINGS, b"", 1, 1)),
    *(
        frame(WINDOW, b"\0\0\0\0"),
        frame(WINDOW, b"\x7f\xff\xff\xff"),
        frame(WINDOW, b"\0" * 4, 0, 1),
    ),
    *(frame(RST, b"\0\0\0\x08", 0, 1) * 50, frame(GOAWAY, b"\0" * 8), frame(PUSH, b"\0" * 9, 4, 1)),
    *(frame(PRIORITY, b"\0\0\0\1\0", 0, 1), frame(CONTINUATION, b"x", 4, 1), frame(99, b"x" * 99)),
    *(frame(DATA, b"x" * 20_000, 0, 1), b"\xff\xff\xff\0\0\0\0\0\1", frame(HEADERS, b"", 0, 2)),
    *(
        frame(CONTINUATION, b"x" * 16_000, 0, 1) * 30,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\0\xff",
    ),
)


@st.composite
def frame_cases(draw: st.DrawFn, model: Model) -> Case:
    """A connection to the gRPC port: calls whose frames are dropped, repeated, cut and mixed."""
    frames = [frame(SETTINGS, b"")]
    for number in range(draw(st.integers(1, 4))):
        frames += draw(_calls(model, 2 * number + 1))
    for _ in range(draw(st.sampled_from((0, 0, 1, 2, 4)))):
        at = draw(st.integers(0, len(frames)))
        how = draw(st.integers(0, 4))
        if how == 0 and at < len(frames):
            del frames[at]
        elif how == 1 and at < len(frames):
            frames[at] = frames[at][: draw(st.integers(0, len(frames[at])))]
        else:
            frames.insert(at, draw(st.sampled_from(_ODD_FRAMES) | st.binary(max_size=20)))
    preface = draw(st.sampled_from((PREFACE,) * 20 + (b"", PREFACE[:9])))
    return Case(model.name, "frames", preface + b"".join(frames) + frame(PING, LAST_PING))


# --- connections of HTTP and of WebSockets, whose parts are repeated ------------------------------

_POST = (
    b"POST /v2/models/preprocessing/infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
)
_HTTP_PARTS = (
    b"GET /v2/health/live HTTP/1.1\r\n\r\n",
    b"\r\n",
    b"a: b\r\n",
    b"GET /",
    b"x" * 100,
    _POST + b"content-length: 4000000\r\n\r\n",
    _POST + b"transfer-encoding: chunked\r\n\r\n",
    b"1\r\n{\r\n",
    b"0\r\n",
    b"0\r\n\r\n",
    _POST + b"content-encoding: deflate\r\ncontent-length: 9\r\n\r\n",
)


def socket_frame(opcode: int, payload: bytes = b"", flags: int = 0x80) -> bytes:
    """A client's frame of up to 125 bytes; its mask is 0."""
    return bytes((opcode | flags, 0x80 | len(payload))) + bytes(4) + payload


_CREATE = json.dumps({"type": "response.create", "input": "Hi", "store": False}).encode()
_SOCKET_PARTS = (
    *(socket_frame(opcode) for opcode in range(16)),
    *(socket_frame(opcode, flags=0) for opcode in (0, 1, 2, 9)),
    *(socket_frame(opcode, b"x" * 125) for opcode in (1, 2, 8, 9, 10)),
    *(socket_frame(1, text) for text in (b"{}", b"\xff", b"[", _CREATE, _CREATE[:40])),
    *(socket_frame(8, code.to_bytes(2, "big")) for code in (1000, 1005, 4999, 65535)),
    *(socket_frame(1, b"x", flags) for flags in (0xC0, 0xA0, 0x90)),
    b"\x81\xff" + b"\xff" * 8,
    b"\x81\x01x",  # without a mask
)


@st.composite
def repeated_cases(draw: st.DrawFn) -> Case:
    """Parts of a connection, each once or very often, in any order."""
    endpoint = draw(st.sampled_from(("http", "socket")))
    parts = _HTTP_PARTS if endpoint == "http" else _SOCKET_PARTS
    counts = st.sampled_from((1, 1, 2, 70, 2000, 40_000))
    repeated = draw(st.lists(st.tuples(st.sampled_from(parts), counts), min_size=1, max_size=5))
    return Case(BLS.name, endpoint, b"".join(part * count for part, count in repeated)[:MAX_BYTES])


def cases() -> st.SearchStrategy[Case]:
    """Of all five models, over both protocols, and below them."""
    return st.sampled_from(MODELS).flatmap(
        lambda m: grpc_cases(m) | grpc_cases(m) | http_cases(m) | frame_cases(m) | repeated_cases()
    )
