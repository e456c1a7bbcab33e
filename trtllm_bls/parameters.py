"""Parameters of the models (``parameters`` in ``config.pbtxt``), parsed once, at load.

All values are strings. A value that still holds a ``${...}`` placeholder is an error, since a
half-filled template would otherwise fail at the first request. ``serve`` overrides paths, addresses
and sizes through environment variables, so that the checked-in files load as they stand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_bls.errors import SettingsError

_TRUE = {"true", "1", "t", "y", "yes"}
_FALSE = {"false", "0", "f", "n", "no"}
MODEL_DIR = "TRTLLM_BLS_MODEL_DIR"
DRAFT_MODEL_DIR = "TRTLLM_BLS_DRAFT_MODEL_DIR"
GRPC_URL = "TRTLLM_BLS_GRPC_URL"
MAX_STREAMS = "TRTLLM_BLS_MAX_STREAMS"
THREADS = "TRTLLM_BLS_ENGINE_THREADS"
_ENGINE_SIZES = (
    "max_batch",
    "max_queue_size",
    "max_tokens_per_step",
    "max_sequence_tokens",
    "max_draft_len",
)


class Parameters:
    """Typed reading of one model's parameters; every error names the model and the key."""

    def __init__(self, args: Mapping[str, str]) -> None:
        config: Mapping[str, Any] = json.loads(args["model_config"])
        self._model = args.get("model_name") or config["name"]
        self._repository = Path(args["model_repository"])
        self._values = {
            key: value["string_value"] for key, value in config.get("parameters", {}).items()
        }

    def text(self, key: str, default: str = "", env: str | None = None) -> str:
        """A string; empty counts as not set."""
        value = (os.environ.get(env) if env else None) or self._values.get(key, "")
        if "${" in value:
            raise self._error(key, value, "fill in the template or remove the parameter")
        return value or default

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.text(key).strip().lower()
        if value and value not in _TRUE | _FALSE:
            raise self._error(key, value, "use true or false")
        return value in _TRUE if value else default

    def number(self, key: str, default: float, env: str | None = None) -> float:
        """A number that is not negative."""
        value = self.text(key, env=env)
        try:
            number = float(value) if value else default
        except ValueError:
            number = -1
        if not 0 <= number < float("inf"):
            raise self._error(key, value, "use a number that is not negative")
        return number

    def count(self, key: str, default: int, least: int = 0, env: str | None = None) -> int:
        """A whole number of at least ``least``."""
        number = self.number(key, default, env)
        if number < least or number != int(number):
            raise self._error(key, f"{number:g}", f"use a whole number of at least {least}")
        return int(number)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of ``choices``; the first is the default."""
        value = self.text(key, choices[0])
        if value not in choices:
            raise self._error(key, value, f"use one of: {', '.join(choices)}")
        return value

    def directory(self, key: str, env: str | None = None) -> Path:
        """An existing directory; a relative one starts at the model repository."""
        value = self.text(key, env=env)
        if not value:
            raise self._error(key, value, "name a directory")
        path = (self._repository.parent / value).resolve()
        if not path.is_dir():
            raise self._error(key, str(path), "no such directory")
        return path

    def optional_directory(self, key: str, env: str | None = None) -> Path | None:
        """Like ``directory``, or ``None`` where nothing is set."""
        return self.directory(key, env) if self.text(key, env=env) else None

    def _error(self, key: str, value: str, mend: str) -> SettingsError:
        return SettingsError(f"model {self._model}: parameter {key} = '{value}': {mend}")


_OVERLAP = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True)
class BlsParameters:
    """What ``tensorrt_llm_bls`` can be told."""

    tokenizer_dir: Path
    add_special_tokens: bool
    skip_special_tokens: bool
    accumulate_tokens: bool
    transport: str
    engine_url: str
    stall_seconds: float
    timeout_seconds: float  # of a request that names none; 0 = no limit
    target: str
    draft: str
    draft_tokenizer_dir: Path | None
    draft_source: str
    num_draft_tokens: int | None
    max_draft_tokens: int
    draft_deadline_seconds: float
    overlap_drafts: bool | None  # None: where it measures faster
    max_streams: int

    @classmethod
    def read(cls, parameters: Parameters) -> BlsParameters:
        """Parse; raises ``SettingsError`` naming the key."""
        return cls(
            tokenizer_dir=parameters.directory("tokenizer_dir", MODEL_DIR),
            add_special_tokens=parameters.flag("add_special_tokens", True),
            skip_special_tokens=parameters.flag("skip_special_tokens", True),
            accumulate_tokens=parameters.flag("accumulate_tokens", False),
            transport=parameters.choice("engine_transport", ("auto", "bls", "grpc")),
            engine_url=parameters.text("engine_url", "localhost:8001", GRPC_URL),
            stall_seconds=parameters.number("engine_stall_seconds", 120),
            timeout_seconds=parameters.number("request_timeout_seconds", 0),
            target=parameters.text("tensorrt_llm_model_name", "tensorrt_llm"),
            draft=parameters.text("tensorrt_llm_draft_model_name"),
            draft_tokenizer_dir=parameters.optional_directory(
                "draft_tokenizer_dir", DRAFT_MODEL_DIR
            ),
            draft_source=parameters.choice("draft_source", ("off", "model", "ngram", "mixed")),
            num_draft_tokens=parameters.count("num_draft_tokens", 0) or None,
            max_draft_tokens=parameters.count("max_draft_len", 10),
            draft_deadline_seconds=parameters.number("draft_deadline_seconds", 0.5),
            overlap_drafts=_OVERLAP[parameters.choice("overlap_drafts", tuple(_OVERLAP))],
            max_streams=parameters.count("max_streams", 256, least=1, env=MAX_STREAMS),
        )


@dataclass(frozen=True)
class EngineParameters:
    """What the embedded engine's ``tensorrt_llm`` can be told; 0 leaves a size to the engine."""

    model_dir: Path
    exclude_input: bool
    sizes: Mapping[str, int]  # fields of EmbeddedSettings that were set

    @classmethod
    def read(cls, parameters: Parameters) -> EngineParameters:
        """Parse; raises ``SettingsError`` naming the key."""
        is_draft = parameters.flag("is_draft", False)
        sizes = {key: parameters.count(key, 0) for key in _ENGINE_SIZES}
        sizes["threads"] = parameters.count("threads", 0, env=THREADS)
        return cls(
            model_dir=parameters.directory("model_dir", DRAFT_MODEL_DIR if is_draft else MODEL_DIR),
            exclude_input=parameters.flag("exclude_input_in_output", False),
            sizes={key: size for key, size in sizes.items() if size},
        )
