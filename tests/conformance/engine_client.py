"""The suite's client of a ``tensorrt_llm`` model: raw gRPC, one stream per request.

Owns the wire (names, types and shapes come from the model's own configuration) and what can be
read off the responses of one request. Knows nothing of what is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

Ids: TypeAlias = list[int]
Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]

_TYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
REFUSED = "UNSUPPORTED: "  # how an engine of ours says that it cannot honour a field
_DEADLINE_S = 120  # of a whole request: an engine that hangs fails its test instead of the run
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass(frozen=True)
class Response:
    """One message of a stream; ``error`` is empty unless the server refused or failed."""

    outputs: Arrays
    final: bool
    error: str

    def number(self, name: str) -> Any:
        """The one element of an output of shape [1, 1]."""
        assert self.outputs[name].shape == (1, 1), (name, self.outputs[name].shape)
        return self.outputs[name][0, 0]

    @property
    def ids(self) -> Ids:
        """The valid ids of its first beam; checks the shapes that every response has."""
        ids, lengths = self.outputs["output_ids"], self.outputs["sequence_length"]
        assert ids.ndim == 3 and ids.shape[:2] == (1, 1) == lengths.shape, (
            ids.shape,
            lengths.shape,
        )
        assert ids.dtype == lengths.dtype == np.int32
        assert 0 <= lengths[0, 0] <= ids.shape[2]
        return [int(token) for token in ids[0, 0, : lengths[0, 0]]]


class Stream:
    """A request under way. Reading is lazy; many can be under way at once in one thread."""

    def __init__(self, call: Any, prompt_tokens: int) -> None:
        self._call = call
        self._prompt_tokens = prompt_tokens  # how many ids stand before the answer's own

    def __iter__(self) -> Iterator[Response]:
        for reply in self._call:
            flag = reply.infer_response.parameters["triton_final_response"]
            outputs = _arrays(reply.infer_response)
            yield Response(outputs, flag.bool_param, reply.error_message)

    def cancel(self) -> None:
        """Leave: what a client does that closes its connection."""
        self._call.cancel()

    def answer(self) -> Answer:
        """Everything that comes, to the end of the stream."""
        return Answer(list(self), self._prompt_tokens)


@dataclass(frozen=True)
class Answer:
    """All responses to one request, in order."""

    responses: Sequence[Response]
    prompt_tokens: int = 0

    @property
    def error(self) -> str:
        """What the server said instead of answering; empty if it answered."""
        return " ".join(response.error for response in self.responses if response.error)

    @property
    def ids(self) -> Ids:
        """All generated ids of a request with one row and one sequence."""
        self._needed()
        return [token for response in self.responses for token in response.ids][
            self.prompt_tokens :
        ]

    @property
    def last(self) -> Response:
        """The last response."""
        self._needed()
        return self.responses[-1]

    def _needed(self) -> None:
        """Without an answer there is nothing to test, which an engine may say by name."""
        if self.error.startswith(REFUSED):
            pytest.skip(f"refused by name: {self.error.removeprefix(REFUSED)}")
        assert not self.error, self.error

    def of(self, output: str, index: int) -> Answer:
        """The responses in which ``output`` (``batch_index``, ...) is ``index``."""
        self._needed()
        mine = [response for response in self.responses if response.number(output) == index]
        return Answer(mine, self.prompt_tokens)


class Engine:
    """One model behind Triton; ``types`` of its declared inputs, names of its ``outputs``."""

    def __init__(self, url: str, model: str) -> None:
        self.model = model
        channel = grpc.insecure_channel(url, options=_UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._close = channel.close
        self._numbers = itertools.count(1)
        wanted = service_pb2.ModelConfigRequest(name=model)
        config = self._stub.ModelConfig(wanted, timeout=_DEADLINE_S).config
        self.decoupled: bool = config.model_transaction_policy.decoupled
        self.types = {tensor.name: _type_name(tensor.data_type) for tensor in config.input}
        self.outputs = {tensor.name for tensor in config.output}
        self.parameters = {key: value.string_value for key, value in config.parameters.items()}
        parameter = self.parameters.get("exclude_input_in_output", "")
        self.excludes_input = parameter.lower() in ("true", "1")

    def close(self) -> None:
        """Hang up."""
        self._close()

    def needs(self, *tensors: str) -> None:
        """Skip the test if the deployed release does not declare these inputs or outputs."""
        for name in tensors:
            if name not in self.types and name not in self.outputs:
                pytest.skip(f"this release of {self.model} has no {name}")

    def spelling(self, *names: str) -> str:
        """Which of an input's names this release has."""
        return next(name for name in names if name in self.types)

    def start(
        self,
        prompt: Ids,
        max_tokens: int,
        *,
        outputs: Sequence[str] = (),
        request_id: str | None = None,
        **inputs: Any,
    ) -> Stream:
        """Send a request of one row; the prompt is left out of the answer where that can be asked.

        An input is given as the value of its row: a number, a list, a list of lists; ``None``
        leaves it out.
        """
        row: dict[str, Any] = {
            "input_ids": prompt,
            "input_lengths": len(prompt),
            "request_output_len": max_tokens,
        }
        if "exclude_input_in_output" in self.types:
            row["exclude_input_in_output"] = True
        row = {name: value for name, value in (row | inputs).items() if value is not None}
        excluded = row.get("exclude_input_in_output", self.excludes_input)
        included = 0 if excluded or row.get("streaming") else len(prompt)
        return self.send(self.batch([row]), outputs, request_id, included)

    def ask(self, prompt: Ids, max_tokens: int, **more: Any) -> Answer:
        """``start``, and read it to the end."""
        return self.start(prompt, max_tokens, **more).answer()

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """Rows with the same inputs as arrays, each value in the shape that its input declares."""
        return {
            name: np.array(
                [np.atleast_1d(row[name]) for row in rows], dtype=_TYPES[self.types[name]]
            )
            for name in rows[0]
        }

    def send(
        self,
        arrays: Arrays,
        outputs: Sequence[str] = (),
        request_id: str | None = None,
        included: int = 0,
    ) -> Stream:
        """Send arrays as they are; ``included`` ids of the prompt will stand before the answer.

        Without a ``request_id`` it gets one of its own; an empty one is sent as it is.
        """
        request = service_pb2.ModelInferRequest(model_name=self.model)
        own = f"conformance-{next(self._numbers)}"
        request.id = own if request_id is None else request_id
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, array in arrays.items():
            request.inputs.add(name=name, datatype=self.types[name], shape=array.shape)
            request.raw_input_contents.append(np.ascontiguousarray(array).tobytes())
        for name in outputs:
            request.outputs.add(name=name)
        return Stream(self._stub.ModelStreamInfer(iter([request]), timeout=_DEADLINE_S), included)


def _type_name(data_type: int) -> str:
    return str(model_config_pb2.DataType.Name(data_type)).removeprefix("TYPE_")


def _arrays(response: Any) -> Arrays:
    return {
        output.name: _array(output.datatype, raw).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _array(datatype: str, raw: bytes) -> Array:
    if datatype == "BF16":  # the upper half of an FP32
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, _TYPES[datatype])
