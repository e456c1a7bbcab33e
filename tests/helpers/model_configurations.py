"""Reading model configurations as Triton reads them, and comparing them with the tensor table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.wire.contract import Tensor


def parsed(repository: Path, name: str) -> Any:
    """The ``ModelConfig`` of one model of a repository."""
    text = (repository / name / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def rows_of_config(tensors: Any, inputs: bool) -> set[str]:
    """One line per tensor: name, type, dims, then r(equired), s(calar), R(agged)."""
    return {
        _row(
            tensor.name,
            model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"),
            list(tensor.dims),
            r=inputs and not tensor.optional,
            s=tensor.HasField("reshape"),
            R=inputs and tensor.allow_ragged_batch,
        )
        for tensor in tensors
    }


def rows_of_table(tensors: Iterable[Tensor]) -> set[str]:
    """The same lines, of rows of the contract."""
    return {
        _row(
            tensor.name,
            tensor.dtype,
            list(tensor.dims),
            r=tensor.required,
            s=tensor.scalar,
            R=tensor.ragged,
        )
        for tensor in tensors
    }


def _row(name: str, dtype: str, dims: list[int], **flags: bool) -> str:
    set_ones = [flag for flag, is_set in flags.items() if is_set]
    return " ".join([name, dtype, str(dims).replace(" ", ""), *set_ones])


def check_wires(repository: Path) -> None:
    """Every wire of the ensemble has two ends of one type, and nothing is left over.

    Triton refuses to load an ensemble otherwise, or ignores what a caller sent.
    """
    ensemble = parsed(repository, "ensemble")
    known = _types(ensemble.input)
    consumed: set[str] = set()
    made: set[str] = set()
    for step in ensemble.ensemble_scheduling.step:
        model = parsed(repository, step.model_name)
        inputs, outputs = _types(model.input), _types(model.output)
        assert {name: known[wire] for name, wire in step.input_map.items()}.items() <= (
            inputs.items()
        )
        assert {tensor.name for tensor in model.input if not tensor.optional} <= set(step.input_map)
        assert ensemble.max_batch_size <= model.max_batch_size
        new = {wire: outputs[name] for name, wire in step.output_map.items()}
        assert not new.keys() & known.keys()
        known |= new
        consumed |= set(step.input_map.values())
        made |= new.keys()
    results = _types(ensemble.output)
    assert results.items() <= known.items()
    assert results.keys() <= made
    assert consumed == _types(ensemble.input).keys() | (made - results.keys())


def _types(tensors: Any) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in tensors}
