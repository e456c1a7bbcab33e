"""The options of commands, declared once as fields of dataclasses.

``setting`` declares a field that is an option too, ``options_of`` makes a command's options of such
fields, or of a model's parameters. ``ServeSettings`` are the options of ``serve``; ``openai`` takes
those that it has in common from there. Nothing here looks at processes or at ports that are in use.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import resource
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.settings.model_names import BLS_NAME, ENGINE_NAME
from trtllm_bls.settings.parameters import ENGINE_CHOICE, BlsParameters, EngineChoice, parse_engine
from trtllm_bls.text.chat_formats import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.text.json_values import json_value

_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_OVERRIDE = re.compile(r"(?P<model>[^.=\s]+)\.(?P<parameter>[^=\s]+)=(?P<value>.*)", re.DOTALL)
# Types of fields, with what click reads them as.
Positive = Annotated[int, click.IntRange(1)]
NotNegative = Annotated[int, click.IntRange(0)]
Port = Annotated[int, click.IntRange(0, 65535)]
ExistingFile = Annotated[Path, click.Path(exists=True, dir_okay=False, path_type=Path)]
_Command = TypeVar("_Command", bound=Callable[..., Any])
AMPLE_OPEN_FILES = 65536  # room for idle connections, too


class GrpcAddress(click.types.StringParamType):
    """The address of a gRPC server, HOST:PORT.

    gRPC would try port 443 for an address without a port, so such an address is refused. Addresses
    with a scheme (`dns:///gpu:8001`, `http://HOST:PORT/v1` of `chat`) are read by the command.
    """

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the address as it is; fails for a host that has no port."""
        address = str(value)
        bare_ipv6 = re.fullmatch(r"[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*", address)
        host_alone = re.fullmatch(r"[\w.-]*|\[[0-9a-fA-F:.]*\]", address)
        if not host_alone and not bare_ipv6:
            return address
        host = address or "localhost"
        if bare_ipv6:
            host = f"[{address}]"
        self.fail(f"{address!r} names no port; Triton's gRPC port is 8001: {host}:8001")


def _lora(text: str) -> str:
    name, separator, task_id = text.partition("=")
    is_task_id = task_id.isdecimal() and int(task_id) < 2**64
    if not name or (separator and not is_task_id):
        raise click.BadParameter(f"{text!r} must be NAME or NAME=TASK_ID, a number of 64 bits")
    return text


def _pipeline_header(text: str) -> str:
    name = text.lower()
    if not _HEADER_NAME.fullmatch(name):
        raise click.BadParameter(f"{text!r} is no name of a header, such as X-Team")
    if name in ("authorization", "x-api-key"):
        raise click.BadParameter(f"{text!r}: pipelines get a digest of the key, request.key")
    return name


def _json_object(text: str) -> str:
    value = json_value(text)
    if not isinstance(value, dict):
        example = "'{\"enable_thinking\": false}'"
        raise click.BadParameter(f"{text!r} must be a JSON object, such as {example}")
    return text


# --- from a field to an option --------------------------------------------------------------


def setting(
    help: str,
    default: Any = None,
    *,
    flag: str = "",
    aliases: tuple[str, ...] = (),
    sets: tuple[str, str] | None = None,
    **click_options: Any,
) -> Any:
    """Declare a field of a dataclass that is an option too.

    ``flag`` is its spelling where that is not made of the field's name, ``aliases`` are further
    spellings that help does not show. ``sets`` is the model's parameter (model, key) that the
    option sets, for ``configure``. click reads ``click_options``.
    """
    about = {"flag": flag, "aliases": aliases, "sets": sets}
    return field(default=default, metadata={**about, "click": {"help": help, **click_options}})


def option(field: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + field.replace("_", "-")


def words_of(options: Any, names: Collection[str]) -> Iterator[str]:
    """Return the words of a command line that ``options_of`` reads as ``names``."""
    for setting in fields(options):
        value = getattr(options, setting.name)
        if setting.name not in names or value is None or value is False:
            continue
        flag = setting.metadata["flag"] or option(setting.name)
        if value is True:
            yield flag
        elif isinstance(value, tuple):
            for item in value:
                yield f"{flag}={item}"
        else:
            yield f"{flag}={value}"


class _Option(click.Option):
    """An option whose help shows no aliases."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        flags = self.opts
        self.opts = flags[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = flags


def deprecated(remedy: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command say on standard error when it goes, and what to do instead."""

    def warning(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def warn(*arguments: Any, **options: Any) -> None:
            name = click.get_current_context().info_name
            click.echo(f"warning: {name} is deprecated and goes with 0.7.0; {remedy}", err=True)
            function(*arguments, **options)

        return warn

    return warning


def options_of(
    settings: type, *names: str, **aliases: tuple[str, ...]
) -> Callable[[_Command], _Command]:
    """Add the options of a dataclass, or of its fields ``names``, in the order of the fields.

    ``aliases`` are further spellings, by field, that only this command has.
    """
    hints = get_type_hints(settings, include_extras=True)

    def decorate(command: _Command) -> _Command:
        for setting in reversed(fields(settings)):
            if setting.metadata and (not names or setting.name in names):
                add_option = _option(setting, hints[setting.name], aliases.get(setting.name, ()))
                command = add_option(command)
        return command

    return decorate


def _option(
    setting: Field[Any], hint: Any, aliases: tuple[str, ...]
) -> Callable[[_Command], _Command]:
    name = setting.name
    metadata = setting.metadata
    if parameter := metadata.get("parameter"):
        # The parameter of a model is checked when it is used, so click hands on its text.
        help = parameter.help.replace("`", "")
        if parameter.default:
            help += f"  [default: {parameter.default}]"
        return click.option(option(name), name, help=help, metavar="VALUE")
    click_options = dict(metadata["click"])
    kind, *_ = get_args(hint) or (hint,)  # the type without "or None", or that of a tuple's items
    for annotation in (hint, kind):
        if get_origin(annotation) is Annotated:
            click_options["type"] = annotation.__metadata__[0]
    click_options["multiple"] = get_origin(hint) is tuple
    if setting.default not in (None, "", MISSING):
        click_options["default"] = setting.default
        click_options["show_default"] = True
    if setting.default is False:
        click_options["is_flag"] = True
    elif get_origin(hint) is Literal:
        click_options["type"] = click.Choice(get_args(hint))
    elif kind is Path:
        click_options.setdefault("type", click.Path(path_type=Path))
    else:
        click_options.setdefault("type", kind)
    flags = (metadata["flag"] or option(name), *metadata["aliases"], *aliases)
    return click.option(*flags, name, cls=_Option, **click_options)


# --- TLS of commands that connect -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TlsConnection:
    """The TLS options of every command that connects to a server.

    The aliases are the spellings of TensorRT-LLM's own clients.
    """

    tls: bool = setting(
        "Connect with TLS; the other --tls options imply it.", False, aliases=("-s", "--ssl")
    )
    tls_ca: ExistingFile | None = setting(
        "Authorities to trust, in PEM.  [default: the system's]",
        aliases=("-r", "--root-certificates"),
    )
    tls_cert: ExistingFile | None = setting(
        "Certificate to show, in PEM.", aliases=("-x", "--certificate-chain")
    )
    tls_key: ExistingFile | None = setting("Key of --tls-cert, in PEM.", aliases=("--private-key",))
    tls_server_name: str | None = setting(
        "Name in the server's certificate, if it is not the host of --url.",
        aliases=("--server-name",),
    )


# --- --set ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Override:
    """A parameter of a model's configuration, replaced or added for this server only."""

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


# --- serve ----------------------------------------------------------------------------------


class ProcessCount(click.IntRange):
    """A number of processes, or the word ``auto``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "auto":
            return value
        return super().convert(value, param, ctx)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Count the cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no file, or "max" for its first word
        allowed, period = map(int, quota.read_text(encoding="ascii").split())
        cores = max(1, min(cores, math.ceil(allowed / period)))
    return cores


def auto_processes(max_streams: int, remembers: bool) -> tuple[int, str]:
    """Return how many processes ``auto`` means, and a line that says why.

    The processes are those of the OpenAI API, or of ``tensorrt_llm_bls``.

    One for each 64 streams, whose first tokens would wait for each other, up to 4 and a quarter of
    the cores; the engine and the server's threads need the others. Above 1,024 streams up to 8 and
    half of the cores, since 4 end at 70,000 tokens/s. One where a process ``remembers`` prompts or
    answers for later requests: others would not know them.
    """
    if remembers:
        return 1, "processes: 1 (auto: engine_affinity or draft_memory_tokens needs all requests)"
    cores = usable_cores()
    limit = min(4, cores // 4)
    if max_streams > 1024 and cores > 4:
        limit = min(8, cores // 2)
    count = max(1, min(limit, math.ceil(max_streams / 64)))
    return count, f"processes: {count} (auto: {cores} cores, max_streams {max_streams})"


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Everything a server is started with.

    A port of 0 means any free port, except ``openai_port``, where it means no OpenAI API. Times
    are seconds. ``None`` means: for ``server`` to search for one (``operate.checks``); for
    ``model``, ``draft_model`` and ``model_repository`` to use those of the package; for ``threads``
    the engine's choice; for ``bls_instances`` and ``decoupled`` what the configuration of
    ``tensorrt_llm_bls`` says, except that ``bls_instances`` is ``auto`` with the package's own.
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
    threads: Positive | None = setting("CPU threads of each embedded engine.")
    overrides: tuple[Override, ...] = setting(
        "Replace a parameter of a model's configuration; may be repeated.",
        (),
        flag="--set",
        type=Override.parse,
        metavar="MODEL.PARAMETER=VALUE",
    )
    host: str = setting("Address to listen on.", "127.0.0.1")
    expose: bool = setting(
        "Allow a --host that other machines can reach. `serve` always needs it for that, `openai` "
        "only without keys.",
        False,
    )
    http_port: Port = setting(
        "Port of Triton's HTTP API, behind limits and TLS of ours; 0 = any free port.", 8000
    )
    triton_http_port: Port | None = setting(
        "Also open Triton's own HTTP port; 0 = any free port. It has no TLS and no limits, and a "
        "generate runs on when its caller leaves. [default: for this machine alone, at any port]"
    )
    triton_infer: Literal["on", "off"] = setting(
        "Answer `infer` on the HTTP port, any tensor of any model; off leaves generate.", "on"
    )
    http_keys: bool = setting(
        "Ask for a key of --api-keys-file on the HTTP port too, but for health.", False
    )
    allowed_hosts: tuple[str, ...] = setting(
        "A name by which clients reach a --host of this machine alone, as behind a proxy; IP "
        "addresses and localhost are always allowed; may be repeated.",
        (),
        flag="--allowed-host",
        metavar="NAME",
    )
    allowed_origins: tuple[str, ...] = setting(
        "Let web pages of this origin use HTTP (CORS for the OpenAI API); may be repeated; * = "
        "all.",
        (),
        flag="--allow-origin",
        metavar="ORIGIN",
    )
    max_body_bytes: Positive = setting(
        "Largest JSON body of a generate request or of the OpenAI API, also unpacked.", 4 * 2**20
    )
    grpc_port: Port = setting("gRPC port; 0 = any free port.", 8001)
    metrics_port: Port = setting("Metrics port; 0 = any free port.", 8002)
    health_port: Port = setting(
        "Port of /health/live, /health/ready, /health/startup; 0 = any free port.", 8003
    )
    openai_port: Port = setting("Port of the OpenAI API; 0 = none.", 9000)
    openai_workers: int | Literal["auto"] = setting(
        "Processes of the OpenAI API: a number, or auto (by cores and --max-streams).",
        "auto",
        type=ProcessCount(1),
        metavar="N|auto",
    )
    api_keys_file: Path | None = setting(
        "Keys that clients of the OpenAI API must bring, one a line; also in TRTLLM_BLS_API_KEYS, "
        "with commas."
    )
    served_model_names: tuple[str, ...] = setting(
        "What requests of the OpenAI API call the model (default: its directory's name); may be "
        "repeated.",
        (),
        flag="--served-model-name",
        metavar="NAME",
    )
    loras: tuple[str, ...] = setting(
        "A LoRA adapter, which requests of the OpenAI API name as a model: NAME=TASK_ID of one in "
        "the engine's cache, or NAME of one in its model.yaml; may be repeated.",
        (),
        flag="--lora",
        type=_lora,
        metavar="NAME[=TASK_ID]",
    )
    tool_parser: str = setting(
        "How the model writes tool calls, for the OpenAI API; auto: by its chat template. Names: "
        f"none, {', '.join(TOOL_FORMATS)}.",
        "auto",
        type=click.Choice(["auto", "none", *TOOL_FORMATS]),
        metavar="NAME",
    )
    reasoning_parser: str = setting(
        "How the model marks reasoning, for the OpenAI API; auto: by its chat template. Names: "
        f"none, {', '.join(REASONING_TAGS)}.",
        "auto",
        type=click.Choice(["auto", "none", *REASONING_TAGS]),
        metavar="NAME",
    )
    chat_template_kwargs: str = setting(
        "Variables of the chat template for the OpenAI API, a JSON object. A request's own "
        "chat_template_kwargs, reasoning_effort and thinking come before them.",
        "{}",
        type=_json_object,
        metavar="JSON",
    )
    pipeline_headers: tuple[str, ...] = setting(
        "A header of requests of the OpenAI API that pipelines are told (request.headers); may be "
        "repeated.",
        (),
        flag="--pipeline-header",
        type=_pipeline_header,
        metavar="NAME",
    )
    unreadable: Literal["replace", "refuse"] = setting(
        "What becomes of images and files in requests of the OpenAI API: the model reads a "
        "sentence in their place, or the request is refused.",
        "replace",
    )
    store_bytes: NotNegative = setting(
        "How much of the Responses API is stored for later requests; 0 = nothing.", 256 * 2**20
    )
    store_hours: Positive = setting("Hours after its last use that a response is stored.", 24)
    store_dir: Path | None = setting(
        "Directory of stored responses, which keeps them over restarts. [default: one that is "
        "removed when the server ends]"
    )
    lost_items: Literal["refuse", "sentence"] = setting(
        "What becomes of a request for an item that is no longer stored: it is refused, or the "
        "model reads a sentence in the item's place.",
        "refuse",
    )
    share_kv_cache: bool = setting(
        "Requests with different API keys may share the engine's KV cache, whose times tell what "
        "others have asked.",
        False,
    )
    max_streams: Positive = setting(
        "Requests that may run at once; up to twice as many with several processes.",
        BlsParameters.max_streams,
    )
    bls_instances: int | Literal["auto"] | None = setting(
        f"Processes of {BLS_NAME}.  [default: auto; what --model-repository says, if given]",
        type=ProcessCount(1),
        metavar="N|auto",
    )
    thread_pool_size: Positive | None = setting(
        "Triton's threads for each Python model. [default: 4; one for each stream where the engine "
        "is called inside Triton or a model's code is not ours.] Where a model calls another one "
        "inside Triton, do not set fewer than there are streams: each call holds a thread until "
        "its first token."
    )
    decoupled: bool | None = setting(
        f"Whether the models stream; false allows unary requests instead, to {ENGINE_NAME} and the "
        "ensemble too, whose answers then repeat the prompt, as TensorRT-LLM's models do."
    )
    open_control_apis: bool = setting(
        "Leave Triton's shared-memory, model-repository, logging and trace APIs open to clients.",
        False,
    )
    tls_cert: Path | None = setting(
        "Certificate to serve with TLS (HTTP, gRPC, OpenAI API), in PEM.",
        aliases=("--ssl-certfile",),
    )
    tls_key: Path | None = setting("Key of --tls-cert, in PEM.", aliases=("--ssl-keyfile",))
    tls_client_ca: Path | None = setting(
        "Accept only clients with a certificate of these authorities, in PEM.",
        aliases=("--ssl-ca-certs",),
    )
    exit_timeout: Positive = setting("Seconds that running requests have to end when stopping.", 30)
    ready_timeout: Positive = setting("Seconds that the models have to load.", 900)
    stall_timeout: Positive = setting(
        "Seconds without any progress after which the server is not ready; after twice as long it "
        "has failed.",
        30,
    )
    on_failure: Literal["restart", "exit"] = setting(
        "What to do when the server or one of its processes dies, stops or is stuck.", "restart"
    )
    log_file: Path | None = setting("Append the server's whole log to this file.")
    no_checks: bool = setting(
        "Start whatever the checks of machine and repository find; errors are warnings.",
        False,
    )

    @property
    def plain_host(self) -> str:
        """The address of Triton's HTTP and metrics ports, which have no TLS.

        Where the other ports have TLS, only this machine reaches these two.
        """
        if self.tls_cert is not None:
            return "127.0.0.1"
        return self.host

    def __post_init__(self) -> None:
        """Refuse what no server can be started with, and an open port that was not asked for."""
        if not self.expose and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host}: every machine that reaches this one could use the server, "
                "which asks for no password; add --expose if that is intended"
            )
        names: dict[int, str] = {}
        for setting in fields(self):
            if not setting.name.endswith("_port"):
                continue
            port = getattr(self, setting.name)
            if port and names.setdefault(port, setting.name) != setting.name:
                raise SettingsError(
                    f"{option(setting.name)} {port}: {option(names[port])} has it; choose another"
                )
        for name in ("api_keys_file", "tls_cert", "tls_key", "tls_client_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingsError(f"{option(name)} {path}: no such file")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("--tls-cert and --tls-key: give both or neither")
        if self.tls_client_ca is not None:
            if self.tls_cert is None:
                raise SettingsError("--tls-client-ca: needs --tls-cert and --tls-key")
            parameters = {override.parameter for override in self.overrides}
            has_certificate = {"engine_tls_cert", "engine_tls_key"} <= parameters
            if not (self.engine_is_elsewhere or has_certificate):
                raise SettingsError(
                    f"--tls-client-ca: {BLS_NAME} calls the server too and needs a "
                    "certificate of its own from that authority: add "
                    f"--set {BLS_NAME}.engine_tls_cert=FILE and "
                    f"--set {BLS_NAME}.engine_tls_key=FILE"
                )
        if self.engine_is_elsewhere:
            if self.model is None and self.model_repository is None:
                raise SettingsError(f"--engine {self.engine}: needs --model, for its tokenizer")
            if self.draft_model is not None:
                raise SettingsError(
                    f"--engine {self.engine}: takes no --draft-model; drafts are made where it is"
                )

    @property
    def engine_choice(self) -> EngineChoice | None:
        """The engine that ``engine`` names, if any. Raises ``SettingsError``."""
        if self.engine is None:
            return None
        try:
            return parse_engine(self.engine)
        except ValueError:
            raise SettingsError(f"--engine {self.engine!r}: use {ENGINE_CHOICE.expected}") from None

    @property
    def engine_is_elsewhere(self) -> bool:
        """True if the server runs no engine of its own."""
        choice = self.engine_choice
        return choice is not None and choice.is_elsewhere


# --- addresses ------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a server at ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def raise_open_files(needed: int, remedy: str) -> None:
    """Let this process and its children open as many files as they may.

    Raises ``SetupError``, which ends with ``remedy``, where that is fewer than ``needed``. A server
    without file descriptors accepts no connection, or resets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SetupError(
            f"only {hard} files may be open (ulimit -Hn), {needed} are needed: allow more "
            f"(docker run --ulimit nofile={needed}) or {remedy}"
        )
    limit = AMPLE_OPEN_FILES
    if hard != resource.RLIM_INFINITY:
        limit = min(hard, limit)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def listen(host: str, port: int, option: str, zero: str = "any free port") -> socket.socket:
    """Open a socket that listens at ``port``.

    Raises ``SetupError`` that names ``option``, by which another port can be chosen; its value 0
    means ``zero``.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (while")[0].lower()
        raise SetupError(
            f"port {port} on {host}: {problem}; "
            f"stop what uses it or choose another with {option} (0 = {zero})"
        ) from error
