"""Reading a model's parameters, once, at load.

All values are strings. A value that still holds a ``${...}`` placeholder is an error, since a
half-filled template would otherwise fail at the first request. ``serve`` overrides paths, addresses
and sizes through environment variables, so that the checked-in files load as they stand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trtllm_bls.admission import RequestLimits
from trtllm_bls.parameters.engine_choice import EngineChoice
from trtllm_bls.parameters.kinds import DIRECTORY, FILE, Parameter
from trtllm_bls.parameters.table import DRAFT_MODEL_DIR, GIVEN, error, parsed, rows_of


class Parameters:
    """One model's parameters as Triton hands them over; every error names the model and the key.

    ``environment`` overrides them, by the variables that the table names, but for those that
    ``GIVEN`` lists.
    """

    def __init__(
        self, args: Mapping[str, str], environment: Mapping[str, str] = os.environ
    ) -> None:
        config: Mapping[str, Any] = json.loads(args["model_config"])
        self._model = args.get("model_name") or config["name"]
        self.repository = Path(args["model_repository"]).parent  # of all models
        self._values = {
            key: value["string_value"] for key, value in config.get("parameters", {}).items()
        }
        decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._values["decoupled"] = str(decoupled)
        self._environment = environment
        self._given = environment.get(GIVEN, "").split(",")
        groups = config.get("instance_group", [])
        # As in "tensorrt_llm_bls_0_3": the third number of Triton's name for this process.
        self.instance = int(re.sub(r".*\D", "", args.get("model_instance_name", "")) or 0)
        self.instances = max(1, sum(int(group.get("count", 1)) for group in groups))

    @property
    def has_cores(self) -> bool:
        """Whether each process can have a core beside those of the engine and the server."""
        return len(os.sched_getaffinity(0)) >= max(8, 4 * self.instances)

    def read(self, rows: Iterable[Parameter]) -> dict[str, Any]:
        """The values by key, in the type of each row's kind. Raises ``SettingsError``.

        An empty value counts as not set; an optional path that is not set is ``None``.
        """
        return {row.key: self._value(row) for row in rows}

    def _value(self, row: Parameter) -> Any:
        followed = row.env if f"{self._model}.{row.key}" not in self._given else None
        text = self._environment.get(followed or "") or self._values.get(row.key, "")
        value = parsed(self._model, row, text)
        return self._path(row, value) if row.kind in (DIRECTORY, FILE) else value

    def _path(self, row: Parameter, value: Path | None) -> Path | None:
        if value is None:
            if row.optional:
                return None
            raise error(self._model, row.key, "", f"name {row.kind.expected}")
        # Symbolic links stay: a repository may be served through links to its models, and what lies
        # beside it is meant beside the links.
        path = Path(os.path.abspath(self.repository / value))
        if not (path.is_dir() if row.kind is DIRECTORY else path.is_file()):
            kind = row.kind.expected.removeprefix("a ")
            raise error(self._model, row.key, str(path), f"no such {kind}")
        return path


_OVERLAP = {"auto": None, "on": True, "off": False}
# Fields of ``BlsParameters`` whose key is another, and those that are more than a key's value.
_KEYS = {
    "transport": "engine_transport",
    "stall_seconds": "engine_stall_seconds",
    "timeout_seconds": "request_timeout_seconds",
    "target": "tensorrt_llm_model_name",
    "draft": "tensorrt_llm_draft_model_name",
    "max_draft_tokens": "max_draft_len",
    **{name: f"engine_{name}" for name in ("tls_ca", "tls_cert", "tls_key", "tls_pin")},
}
_MADE = {"num_draft_tokens", "overlap_drafts", "one_core", "engine", "engine_max_sequence_tokens"}
_MADE |= {"ignore_unverifiable_drafts", "repository", "instance", "limits"}
_MADE |= {"max_running", "max_queued"}


@dataclass(frozen=True)
class BlsParameters:
    """The parameters of ``tensorrt_llm_bls``."""

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
    one_core: bool = False
    instance: int = 0  # of this process among the model's
    status_dir: str = ""
    engine: EngineChoice | None = None  # None: the model ``target`` of this server
    engine_max_sequence_tokens: int | None = None
    engine_resume: bool = False
    ignore_unverifiable_drafts: bool = False
    decoupled: bool = True
    tls_ca: Path | None = None  # None: no TLS
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_pin: Path | None = None
    log_requests: bool = True
    log_format: str = "logfmt"
    log_prompts: bool = False
    repository: Path | None = None  # the model repository's directory, inside Triton
    max_running: int = 256  # sequences
    max_queued: int = 1024
    max_queue_seconds: float = 60  # 0 = no limit
    expose_kv_cache_metrics: bool = False
    limits: RequestLimits = field(default_factory=RequestLimits)

    @classmethod
    def read(cls, parameters: Parameters) -> BlsParameters:
        """Parse; raises ``SettingsError`` naming the key."""
        value = parameters.read(rows_of("tensorrt_llm_bls").values())
        running, queued = value["max_running_requests"], value["max_queued_requests"]
        if running is None:
            # Requests are not spread evenly: at a process's own share, some would wait there
            # while others have room.
            share = 2 * value["max_streams"] // parameters.instances
            running = max(1, min(share, value["max_streams"]))
        fields = {name: value[_KEYS.get(name, name)] for name in cls.__annotations__.keys() - _MADE}
        return cls(
            **fields,
            num_draft_tokens=value["num_draft_tokens"] or None,
            overlap_drafts=_OVERLAP[value["overlap_drafts"]],
            engine=value["engine"] or None,
            engine_max_sequence_tokens=value["engine_max_sequence_tokens"] or None,
            ignore_unverifiable_drafts=value["unverifiable_drafts"] == "ignore",
            repository=parameters.repository,
            one_core={"on": True, "off": False}.get(value["one_core"], parameters.has_cores),
            instance=parameters.instance,
            max_running=running,
            max_queued=4 * running if queued is None else queued,
            limits=request_limits(value),
        )


def request_limits(value: Mapping[str, Any]) -> RequestLimits:
    """What a model's parameters say of one request; each model has some of the keys."""
    sizes = {
        key: value[key]
        for key in ("max_request_bytes", "max_prompt_bytes", "max_logits_bytes")
        if key in value
    }
    return RequestLimits(
        max_output_tokens=value.get("max_output_tokens") or None,
        max_timeout_s=value.get("max_timeout_seconds") or None,
        **sizes,
    )


@dataclass(frozen=True)
class EngineParameters:
    """The parameters of the embedded engine's ``tensorrt_llm``; 0 leaves a size to the engine."""

    model_dir: Path
    engine: str  # embedded, llm_api or the address of a service
    exclude_input: bool
    expose_kv_cache_metrics: bool
    limits: RequestLimits
    sizes: Mapping[str, int]  # fields of EmbeddedSettings that were set

    @classmethod
    def read(cls, parameters: Parameters) -> EngineParameters:
        """Parse; raises ``SettingsError`` naming the key."""
        rows = rows_of("tensorrt_llm")
        (is_draft,) = parameters.read([rows.pop("is_draft")]).values()
        if is_draft:
            rows["model_dir"] = replace(rows["model_dir"], env=DRAFT_MODEL_DIR)
        value = parameters.read(rows.values())
        limits = request_limits(value)
        for key in ("max_request_bytes", "max_logits_bytes", "max_output_tokens"):
            del value[key]
        return cls(
            model_dir=value.pop("model_dir"),
            engine=value.pop("engine"),
            exclude_input=value.pop("exclude_input_in_output"),
            expose_kv_cache_metrics=value.pop("expose_kv_cache_metrics"),
            limits=limits,
            sizes={key: size for key, size in value.items() if size},
        )
