"""The options of ``trtllm-bls serve``, once: the command line reads its defaults from here.

Owns names, defaults and the text forms of options. Knows nothing of processes, ports that are
busy, or files that exist: the launcher looks at the machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.parameters import EngineChoice, parse_engine, rows_of
from trtllm_bls.parameters.engine_choice import ENGINE

_OVERRIDE = re.compile(r"(?P<model>[^.=\s]+)\.(?P<parameter>[^=\s]+)=(?P<value>.*)", re.DOTALL)


_AT_LEAST_ONE = (
    *("max_streams", "threads", "bls_instances", "openai_workers"),
    *("exit_timeout", "ready_timeout", "stall_timeout"),
)


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

    A port of 0 means "any free port", of ``openai_port`` that there is no OpenAI API. Times are
    seconds. ``None`` leaves the choice to us:
    ``server`` to the search (see ``launcher.find``), ``model``, ``draft_model`` and
    ``model_repository`` to what the package brings, ``threads`` to the engine, ``bls_instances``
    and ``decoupled`` to the configuration of ``tensorrt_llm_bls``.
    """

    server: Path | None = None
    model: Path | None = None
    draft_model: Path | None = None
    engine: str | None = None
    model_repository: Path | None = None
    host: str = "127.0.0.1"
    expose: bool = False
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    health_port: int = 8003
    openai_port: int = 9000
    openai_workers: int = 1
    api_keys_file: Path | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_streams: int = int(rows_of("tensorrt_llm_bls")["max_streams"].default)
    threads: int | None = None
    bls_instances: int | Literal["auto"] | None = None
    decoupled: bool | None = None
    open_control_apis: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    overrides: tuple[Override, ...] = ()
    exit_timeout: int = 30
    ready_timeout: int = 900
    stall_timeout: int = 30
    on_failure: Literal["restart", "exit"] = "restart"
    log_file: Path | None = None

    @property
    def plain_host(self) -> str:
        """Where Triton's HTTP and metrics, which know no TLS, listen: on this machine alone where
        the others have it."""
        return self.host if self.tls_cert is None else "127.0.0.1"

    def __post_init__(self) -> None:
        """Refuse numbers that no server could be started with, and listening by mistake."""
        if not self.expose and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host}: whoever reaches this machine could use the server, which "
                "knows no passwords; add --expose if that is meant"
            )
        _check_tls(self)
        if self.engine_is_elsewhere:
            if self.model is None and self.model_repository is None:
                raise SettingsError(f"--engine {self.engine}: needs --model, for its tokenizer")
            if self.draft_model is not None:
                raise SettingsError(
                    f"--engine {self.engine}: takes no --draft-model; drafts are made where it is"
                )
        for name in ("http_port", "grpc_port", "metrics_port", "health_port", "openai_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise SettingsError(f"{option(name)} {getattr(self, name)}: must be 0 to 65535")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise SettingsError(f"{option(name)} {value}: must be at least 1")

    @property
    def engine_choice(self) -> EngineChoice | None:
        """``engine``, read. Raises ``SettingsError``."""
        try:
            return parse_engine(self.engine) if self.engine is not None else None
        except ValueError:
            raise SettingsError(f"--engine {self.engine!r}: use {ENGINE.expected}") from None

    @property
    def engine_is_elsewhere(self) -> bool:
        """Whether the server runs no engine of its own."""
        choice = self.engine_choice
        return choice is not None and choice.is_elsewhere


def _check_tls(settings: ServeSettings) -> None:
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            raise SettingsError(f"{option(name)} {path}: no such file")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("--tls-cert and --tls-key: give both or neither")
    if settings.tls_client_ca is None:
        return
    if settings.tls_cert is None:
        raise SettingsError("--tls-client-ca: needs --tls-cert and --tls-key")
    named = {row.parameter: row.value for row in settings.overrides}
    own = {"engine_tls_cert", "engine_tls_key"} <= named.keys()
    loopback = named.get("engine_transport") != "bls" and not settings.engine_is_elsewhere
    if loopback and not own:
        raise SettingsError(
            "--tls-client-ca: tensorrt_llm_bls calls the server too and needs a certificate of its "
            "own from that authority: add --set tensorrt_llm_bls.engine_tls_cert=FILE and "
            "--set tensorrt_llm_bls.engine_tls_key=FILE"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server at ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, option: str, zero: str = "any free port") -> socket.socket:
    """A socket that listens at a port, of which ``option`` makes another; 0 of it means ``zero``.

    Raises ``SetupError`` where that cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (while")[0].lower()
        raise SetupError(
            f"port {port} on {host}: {problem}; "
            f"stop what uses it or choose another with {option} (0 = {zero})"
        ) from error


def option(field: str) -> str:
    """The command-line spelling of a settings field."""
    return "--" + field.replace("_", "-")
