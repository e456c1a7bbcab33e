"""A model's ``config.pbtxt``, as Triton reads it."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.errors import SettingsError
from trtllm_bls.settings.faces import CHAT, FACES, PART_INPUTS, ServedPipeline

# Tensors of a pipeline that answers conversations: a request and the events of its answer, as JSON.
CHAT_REQUEST = CHAT.request
CHAT_EVENTS = CHAT.outputs[0][0]


def read_config(path: Path) -> Any:
    """Read the file as a ``ModelConfig`` message; raises ``SettingsError``."""
    config = model_config_pb2.ModelConfig()
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, RecursionError, text_format.ParseError) as error:
        remedy = "mend it"
        if "${" in text:
            remedy = "fill in the template"
        raise SettingsError(f"{path}: cannot be read: {error}; {remedy}") from error
    return config


def values_of(config: Any) -> dict[str, str]:
    """Return a configuration's parameters, sorted by name."""
    return {key: value.string_value for key, value in sorted(config.parameters.items())}


def written_parameters(values: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return parameters in the form that Triton's JSON of a configuration has."""
    parameters = {}
    for key, value in values.items():
        parameters[key] = {"string_value": str(value)}
    return parameters


def dtype_of(tensor: Any) -> str:
    """Return the type of an input or output as the contract spells it, such as ``INT32``."""
    dtype = model_config_pb2.DataType.DESCRIPTOR.values_by_number.get(tensor.data_type)
    if dtype is None:
        # A file may hold any number as a type, and Triton loads it.
        return str(tensor.data_type)
    return str(dtype.name).removeprefix("TYPE_")


def instances_of(config: Any) -> int:
    """Return the number of the model's processes, as far as the configuration says."""
    return max((group.count for group in config.instance_group), default=1)


class _Utilities(ModuleType):
    """Stands for Triton's utilities while a model's file is read: any name is a class."""

    def __getattr__(self, name: str) -> type:
        return type(name, (Exception,), {})


def model_class(model_file: str | os.PathLike[str]) -> Any:
    """Return the class ``TritonPythonModel`` of a ``model.py``, or ``None`` if there is none.

    The file is run outside Triton, with a stand-in for Triton's utilities, which some models
    import.
    """
    name = "triton_python_backend_utils"
    needs_stand_in = name not in sys.modules
    if needs_stand_in:
        sys.modules[name] = _Utilities(name)
    try:
        return runpy.run_path(os.fspath(model_file)).get("TritonPythonModel")
    finally:
        if needs_stand_in:
            del sys.modules[name]


def served_pipelines(repository: Path) -> tuple[ServedPipeline, ...]:
    """Return the models of a repository that answer endpoints by themselves, in order.

    Raises ``SettingsError``.
    """
    pipelines = []
    for file in sorted(repository.glob("*/config.pbtxt")):
        inputs = {tensor.name for tensor in read_config(file).input}
        capabilities = [face.capability for face in FACES if face.request in inputs]
        if capabilities:
            accepts = [kind for kind, name in PART_INPUTS.items() if name in inputs]
            pipelines.append(
                ServedPipeline(file.parent.name, frozenset(capabilities), frozenset(accepts))
            )
    return tuple(pipelines)


# --- what Triton runs -------------------------------------------------------------------------

_BACKEND_OF = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_VERSION = re.compile(r"0|[1-9]\d{0,18}")


def backend_of(config: Any) -> str:
    """Return the backend that runs a model; empty where only the model's files say so."""
    return str(config.backend or _BACKEND_OF.get(config.platform, ""))


def served_versions(config: Any, directory: Path) -> list[Path]:
    """Return the directories of the versions that Triton loads, newest first."""
    versions = {}
    for path in directory.iterdir():
        if _VERSION.fullmatch(path.name):
            versions[int(path.name)] = path
    numbers = sorted(versions, reverse=True)
    policy = config.version_policy
    if policy.HasField("specific"):
        numbers = [number for number in numbers if number in policy.specific.versions]
    elif policy.HasField("latest"):
        numbers = numbers[: policy.latest.num_versions]
    elif not policy.HasField("all"):
        numbers = numbers[:1]
    return [versions[number] for number in numbers]
