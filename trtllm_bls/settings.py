"""The options of ``trtllm-bls serve``, once: the command line reads its defaults from here.

Owns names, defaults and the text forms of options. Knows nothing of processes, ports that are
busy, or files that exist: the launcher looks at the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import rows_of

_OVERRIDE = re.compile(r"(?P<model>[^.=\s]+)\.(?P<parameter>[^=\s]+)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """One parameter of one model's configuration, replaced or added for this server only."""

    model: str
    parameter: str
    value: str

    def __str__(self) -> str:
        return f"{self.model}.{self.parameter}={self.value}"

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read ``MODEL.PARAMETER=VALUE``; raises ``SettingsError`` for any other form."""
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise SettingsError(f"--set {text!r}: write it as MODEL.PARAMETER=VALUE")
        return cls(**match.groupdict())


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything a server is started with.

    A port of 0 means "any free port". Times are seconds. ``None`` leaves the choice to us:
    ``server`` to the search (see ``launcher.find``), ``model``, ``draft_model`` and
    ``model_repository`` to what the checkout holds, ``threads`` to the engine.
    """

    server: Path | None = None
    model: Path | None = None
    draft_model: Path | None = None
    model_repository: Path | None = None
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    max_streams: int = int(rows_of("tensorrt_llm_bls")["max_streams"].default)
    threads: int | None = None
    overrides: tuple[Override, ...] = ()
    exit_timeout: int = 30
    ready_timeout: int = 900
    log_file: Path | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no server could be started with."""
        for name in ("http_port", "grpc_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise SettingsError(f"{option(name)} {getattr(self, name)}: must be 0 to 65535")
        for name in ("max_streams", "threads", "exit_timeout", "ready_timeout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"{option(name)} {value}: must be at least 1")


def option(field: str) -> str:
    """The command-line spelling of a settings field."""
    return "--" + field.replace("_", "-")
