"""A model's ``config.pbtxt``, as Triton reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trtllm_bls.errors import SettingsError


def read_config(path: Path) -> Any:
    """The file as a ``ModelConfig`` message; raises ``SettingsError``."""
    config = model_config_pb2.ModelConfig()
    try:
        text = path.read_text(encoding="utf-8")
        text_format.Parse(text, config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        mend = "fill in the template" if "${" in str(error) else "mend it"
        raise SettingsError(f"{path}: cannot be read: {error}; {mend}") from error
    return config


def values_of(config: Any) -> dict[str, str]:
    """A configuration's parameters, by name in order."""
    return {key: value.string_value for key, value in sorted(config.parameters.items())}


def dtype_of(tensor: Any) -> str:
    """The type of an input or output as the contract spells it, such as ``INT32``."""
    return str(model_config_pb2.DataType.Name(tensor.data_type)).removeprefix("TYPE_")


def instances_of(config: Any) -> int:
    """How many processes the model has, as far as the configuration says."""
    return max((group.count for group in config.instance_group), default=1)
