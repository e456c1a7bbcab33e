"""What one row of the contract says, and nothing about which rows there are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trtllm_bls.errors import InvalidRequest

NUMPY_TYPES: Mapping[str, type] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True)
class Bounds:
    """The numbers a tensor may hold; ``str`` of it is what an error message says."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is not allowed

    def allow(self, value: float) -> bool:
        """Whether ``value`` is a finite number within the bounds."""
        if not math.isfinite(value) or value > self.high:
            return False
        return value > self.low if self.above else value >= self.low

    def __str__(self) -> str:
        low = f"{'greater than' if self.above else 'at least'} {self.low:g}"
        if math.isinf(self.low):
            return "finite" if math.isinf(self.high) else f"at most {self.high:g}"
        return low if math.isinf(self.high) else f"{low} and at most {self.high:g}"


@dataclass(frozen=True)
class Tensor:
    """One input or output.

    ``dims`` exclude the batch. ``scalar`` inputs arrive at a Python model as ``[B]`` although
    clients send ``[B, 1]`` (``reshape`` in the configuration). ``field`` is the name of the value
    inside the package; two rows with one field are two spellings of the same thing. ``since`` and
    ``until`` are the first and the last release of TensorRT-LLM whose models have the tensor.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    field: str = ""
    required: bool = False
    scalar: bool = False
    ragged: bool = False
    bounds: Bounds | None = None
    since: tuple[int, int] = (0, 9)
    until: tuple[int, int] = (99, 99)
    key: str = dataclasses.field(init=False)  # the value's name inside the package
    numpy_type: type = dataclasses.field(init=False)  # of the elements; object for STRING
    single: bool = dataclasses.field(init=False)  # exactly one element per batch row

    def __post_init__(self) -> None:
        """Attributes, not properties: they are read for every value of every request."""
        object.__setattr__(self, "key", self.field or self.name)
        object.__setattr__(self, "numpy_type", NUMPY_TYPES[self.dtype])
        object.__setattr__(self, "single", self.dims == (1,))

    def check(self, value: float) -> None:
        """Raises ``InvalidRequest`` where the value is outside the tensor's bounds."""
        if self.bounds is not None and not self.bounds.allow(value):
            must = self.bounds if math.isfinite(value) else "finite"
            raise InvalidRequest(self.name, f"{value} is not allowed; it must be {must}")


@dataclass(frozen=True)
class Model:
    """One model of the repository: its tensors, in the order of the configuration file."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False
    backend: str = "python"

    @cached_property
    def input_named(self) -> Mapping[str, Tensor]:
        """Inputs by wire name."""
        return {tensor.name: tensor for tensor in self.inputs}

    @cached_property
    def output_named(self) -> Mapping[str, Tensor]:
        """Outputs by wire name."""
        return {tensor.name: tensor for tensor in self.outputs}
