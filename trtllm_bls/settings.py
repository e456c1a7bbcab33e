"""The options of ``trtllm-bls serve``, once: its command line is made of them.

Owns names, defaults and the text forms of options. Knows nothing of processes or ports that are
busy: the launcher looks at the machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from trtllm_bls.chat_parsing import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.parameters import EngineChoice, parse_engine, rows_of
from trtllm_bls.parameters.engine_choice import ENGINE

_OVERRIDE = re.compile(r"(?P<model>[^.=\s]+)\.(?P<parameter>[^=\s]+)=(?P<value>.*)", re.DOTALL)
_Command = TypeVar("_Command", bound=Callable[..., Any])
_AT_LEAST_ONE = (
    *("max_streams", "threads", "bls_instances", "thread_pool_size", "openai_workers"),
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


def setting(help: str, default: Any = None, **more: Any) -> Any:
    """A field of a dataclass that is an option too; ``more``: what click is told beside the help,
    and ``flag``, where that is spelled otherwise."""
    return field(default=default, metadata={"help": help, **more})


def options_of(settings: type, *names: str) -> Callable[[_Command], _Command]:
    """The options of a dataclass's settings, or of those named, with the fields' types."""
    hints = get_type_hints(settings)

    def decorate(command: _Command) -> _Command:
        for each in reversed(fields(settings)):
            if each.metadata and (not names or each.name in names):
                command = _option(each, hints[each.name])(command)
        return command

    return decorate


def _option(setting: Field[Any], hint: Any) -> Callable[[_Command], _Command]:
    more = dict(setting.metadata)
    kind, *_ = get_args(hint) or (hint,)  # without "or None"
    if setting.default not in (None, "", MISSING):
        more |= {"default": setting.default, "show_default": True}
    if setting.default is False:
        more["is_flag"] = True
    elif get_origin(hint) is Literal:
        more["type"] = click.Choice(get_args(hint))
    else:
        more.setdefault("type", click.Path(path_type=Path) if kind is Path else kind)
    return click.option(more.pop("flag", option(setting.name)), setting.name, **more)


def _parse_overrides(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[Override, ...]:
    try:
        return tuple(Override.parse(value) for value in values)
    except SettingsError as error:
        raise click.UsageError(str(error), ctx) from error


def _parse_instances(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not value.isdecimal():
        raise click.UsageError(f"--bls-instances {value!r}: use a number or auto", ctx)
    return int(value)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything a server is started with.

    A port of 0 means "any free port", of ``openai_port`` that there is no OpenAI API. Times are
    seconds. ``None`` leaves the choice to us:
    ``server`` to the search (see ``launcher.checks``), ``model``, ``draft_model`` and
    ``model_repository`` to what the package brings, ``threads`` to the engine, ``bls_instances``
    and ``decoupled`` to the configuration of ``tensorrt_llm_bls``.
    """

    model: Path | None = setting("Checkpoint directory of the model (default: the demo's).")
    engine: str | None = setting(
        "Engine to use instead of one in this server: trtllm://HOST:PORT (trtllm-serve --grpc), "
        "triton+grpc://HOST:PORT/MODEL, several with commas; or triton:MODEL. --model then only "
        "names a tokenizer."
    )
    draft_model: Path | None = setting("Checkpoint directory of the draft model.")
    model_repository: Path | None = setting("Model repository (default: our own).")
    server: Path | None = setting("tritonserver: its directory or its binary.")
    threads: int | None = setting("CPU threads of each embedded engine.")
    overrides: tuple[Override, ...] = setting(
        "Replace a parameter of a model's configuration; may be repeated.",
        (),
        flag="--set",
        type=str,
        multiple=True,
        metavar="MODEL.PARAMETER=VALUE",
        callback=_parse_overrides,
    )
    host: str = setting("Address to listen on.", "127.0.0.1")
    expose: bool = setting("Allow a --host that other machines can reach.", False)
    http_port: int = setting("HTTP port; 0 = any free port.", 8000)
    grpc_port: int = setting("gRPC port; 0 = any free port.", 8001)
    metrics_port: int = setting("Metrics port; 0 = any free port.", 8002)
    health_port: int = setting(
        "Port of /health/live, /health/ready, /health/startup; 0 = any free port.", 8003
    )
    openai_port: int = setting("Port of the OpenAI API; 0 = none.", 9000)
    openai_workers: int = setting("Processes of the OpenAI API.", 1)
    api_keys_file: Path | None = setting(
        "Keys that clients of the OpenAI API must bring, one a line."
    )
    tool_parser: str = setting(
        "How the model writes tool calls, for the OpenAI API; auto: by its chat template.",
        "auto",
        type=click.Choice(["auto", "none", *TOOL_FORMATS]),
    )
    reasoning_parser: str = setting(
        "How the model marks reasoning, for the OpenAI API; auto: by its chat template.",
        "auto",
        type=click.Choice(["auto", "none", *REASONING_TAGS]),
    )
    max_streams: int = setting(
        "Requests that may run at once; up to twice as many with several --bls-instances.",
        int(rows_of("tensorrt_llm_bls")["max_streams"].default),
    )
    bls_instances: int | Literal["auto"] | None = setting(
        "Processes of tensorrt_llm_bls: a number, or auto (by the number of cores).",
        type=str,
        metavar="N|auto",
        callback=_parse_instances,
    )
    thread_pool_size: int | None = setting(
        "Triton's threads of each Python model (default: 4; one for each stream where the engine "
        "is called inside Triton, or a model's code is not our own). Fewer than streams only "
        "where no model calls another one inside Triton: each call holds one until its first token."
    )
    decoupled: bool | None = setting(
        "Whether tensorrt_llm_bls streams; false allows unary requests instead."
    )
    open_control_apis: bool = setting(
        "Leave Triton's shared-memory, model-repository, logging and trace APIs open to clients.",
        False,
    )
    tls_cert: Path | None = setting("Certificate of the gRPC, HTTP and OpenAI API ports, in PEM.")
    tls_key: Path | None = setting("Key of --tls-cert, in PEM.")
    tls_client_ca: Path | None = setting(
        "Whose certificates the clients of these ports must show, in PEM."
    )
    exit_timeout: int = setting("Seconds that running requests have to end when stopping.", 30)
    ready_timeout: int = setting("Seconds that the models have to load.", 900)
    stall_timeout: int = setting(
        "Seconds without any progress after which the server is not ready; after twice as long it "
        "has failed.",
        30,
    )
    on_failure: Literal["restart", "exit"] = setting(
        "What to do when the server or one of its processes dies, stops or is stuck.", "restart"
    )
    log_file: Path | None = setting("Append the server's whole log to this file.")

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
        _check_files(self)
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


def _check_files(settings: ServeSettings) -> None:
    for name in ("api_keys_file", "tls_cert", "tls_key", "tls_client_ca"):
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
