"""A model's ``config.pbtxt``, as Triton reads it."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.errors import SettingsError

# Tensors of a pipeline that answers conversations: a request and the events of its answer, as JSON.
CHAT_REQUEST, CHAT_EVENTS = "chat_request", "chat_events"


def read_config(path: Path) -> Any:
    """The file as a ``ModelConfig`` message; raises ``SettingsError``."""
    config = model_config_pb2.ModelConfig()
    try:
        text = path.read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, RecursionError, text_format.ParseError) as error:
        mend = "fill in the template" if "${" in str(error) else "mend it"
        raise SettingsError(f"{path}: cannot be read: {error}; {mend}") from error
    return config


def values_of(config: Any) -> dict[str, str]:
    """A configuration's parameters, by name in order."""
    return {key: value.string_value for key, value in sorted(config.parameters.items())}


def dtype_of(tensor: Any) -> str:
    """The type of an input or output as the contract spells it, such as ``INT32``."""
    known = model_config_pb2.DataType.DESCRIPTOR.values_by_number.get(tensor.data_type)
    # Any number can be written, and Triton loads it.
    return known.name.removeprefix("TYPE_") if known else str(tensor.data_type)


def instances_of(config: Any) -> int:
    """How many processes the model has, as far as the configuration says."""
    return max((group.count for group in config.instance_group), default=1)


class _Utilities(ModuleType):
    """Stands for Triton's utilities while a model's file is read: any name is a class."""

    def __getattr__(self, name: str) -> type:
        return type(name, (Exception,), {})


def model_class(model_file: str | os.PathLike[str]) -> Any:
    """The class ``TritonPythonModel`` of a ``model.py``, read outside Triton, whose utilities some
    models import. ``None``: there is no such class."""
    name = "triton_python_backend_utils"
    if stands_in := name not in sys.modules:
        sys.modules[name] = _Utilities(name)
    try:
        return runpy.run_path(os.fspath(model_file)).get("TritonPythonModel")
    finally:
        if stands_in:
            del sys.modules[name]


def chat_pipelines(repository: Path) -> tuple[str, ...]:
    """The models of a repository that answer conversations by themselves, in order.

    Raises ``SettingsError``.
    """
    files = sorted(repository.glob("*/config.pbtxt"))
    declared = [(file, {tensor.name for tensor in read_config(file).input}) for file in files]
    return tuple(file.parent.name for file, inputs in declared if CHAT_REQUEST in inputs)


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
    """The backend that runs a model; empty where only the model's files say so."""
    return str(config.backend or _BACKEND_OF.get(config.platform, ""))


def served_versions(config: Any, directory: Path) -> list[Path]:
    """The directories of the versions that Triton loads."""
    directories = {int(d.name): d for d in directory.iterdir() if _VERSION.fullmatch(d.name)}
    policy, newest = config.version_policy, sorted(directories, reverse=True)
    if policy.HasField("specific"):
        newest = [number for number in newest if number in policy.specific.versions]
    elif not policy.HasField("all"):
        newest = newest[: policy.latest.num_versions if policy.HasField("latest") else 1]
    return [directories[number] for number in newest]
