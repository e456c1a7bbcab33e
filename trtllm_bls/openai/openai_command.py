"""``trtllm-bls openai``: options, most of them the parameters of ``tensorrt_llm_bls``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from trtllm_bls.errors import SettingsError
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings.command_options import (
    ProcessCount,
    ServeSettings,
    auto_processes,
    is_loopback,
    options_of,
    setting,
)
from trtllm_bls.settings.faces import ServedPipeline
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import (
    DIRECTORY,
    FILE,
    BlsParameters,
    Parameters,
    check,
    parameters_in,
    share_of,
)

# Parameters of Triton's tensors, or of the call of the engine from inside Triton.
_INSIDE_TRITON = ("accumulate_tokens", "decoupled", "engine_transport")
DECLARED = {
    key: row for key, row in parameters_in(BlsParameters).items() if key not in _INSIDE_TRITON
}
_TLS = ("tls_cert", "tls_key", "tls_client_ca")
# Options that are fields of ``ApiSettings`` of the same name.
_API_OPTIONS = (
    *("max_body_bytes", "allowed_origins", "tool_parser", "reasoning_parser", "unreadable"),
    *("store_bytes", "store_hours", "store_dir", "lost_items", "share_kv_cache"),
    "pipeline_headers",
)
# The options that ``serve`` has too.
SERVE_OPTIONS = (
    *("host", "expose", "api_keys_file", "exit_timeout", *_TLS),
    *("allowed_hosts", "loras", "served_model_names", "chat_template_kwargs", *_API_OPTIONS),
)


@dataclass(frozen=True)
class _Options:
    """The options that ``serve`` does not have, or has by other names."""

    port: int = setting("Port; 0 = any free port.", 9000, type=click.IntRange(0, 65535))
    workers: int | Literal["auto"] = setting(
        "Processes that share the port; auto: by cores and --max-streams.",
        "auto",
        type=ProcessCount(1),
        metavar="N|auto",
    )
    model_repository: Path | None = setting(
        f"Take what is not given here from this repository's {BLS_NAME}."
    )


@click.command()
@options_of(_Options)
@options_of(ServeSettings, *SERVE_OPTIONS)
@click.option("--in-front-of", hidden=True)  # a TritonFront, as JSON
@options_of(BlsParameters, *DECLARED)
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Serve OpenAI's HTTP API from an engine in Triton, until Ctrl-C or SIGTERM.

    \b
    Examples:
      trtllm-bls openai --engine-url localhost:8001 --tokenizer-dir ./llama
      trtllm-bls openai --model-repository /repo --api-keys-file keys.txt
    """
    try:
        from trtllm_bls.http.keys import read_keys
        from trtllm_bls.openai.api_settings import ApiSettings
        from trtllm_bls.openai.workers import TritonFront, serve
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{error.name} is not installed; pip install 'trtllm-bls[openai]'"
        ) from error
    keys = read_keys(options["api_keys_file"])
    if not (keys or options["expose"] or is_loopback(options["host"])):
        raise SettingsError(
            f"--host {options['host']}: every machine that reaches this one could use the API; add "
            "--api-keys-file, or --expose if that is intended"
        )
    front = options["in_front_of"] and TritonFront(**json.loads(options["in_front_of"]))
    repository = options["model_repository"]
    workers = options["workers"]
    workers_note = ""
    parameters = None
    if not (front and front.alone):
        parameters = read_parameters(repository, command_line_parameters(context, options))
        if workers == "auto":
            remembers = parameters.engine_affinity or parameters.draft_memory_tokens > 0
            workers, workers_note = auto_processes(parameters.max_streams, remembers)
        parameters = replace(parameters, instances=workers)
        if front:
            running, waiting = places_of(repository)
            places = (share_of(running, workers), share_of(waiting, workers))
            front = replace(front, places=places)
    if parameters and parameters.status_dir and not front:  # with a front ``serve`` has done so
        try:
            StatusDirectory(parameters.status_dir).forget_drain()
        except OSError as error:
            raise SettingsError(f"status_dir {parameters.status_dir}: {error.strerror}") from error
    from trtllm_bls.settings.model_config import served_pipelines

    default_name = ""
    status_dir = ""
    pipelines: tuple[ServedPipeline, ...] = ()
    if parameters:
        default_name = parameters.tokenizer_dir.name
        status_dir = parameters.status_dir
        if repository:
            pipelines = served_pipelines(repository)
    api = ApiSettings(
        model_names=options["served_model_names"] or (default_name,),
        keys=keys,
        loras=dict(lora.partition("=")[::2] for lora in options["loras"]),
        chat_template_kwargs=json.loads(options["chat_template_kwargs"]),
        allowed_hosts=options["allowed_hosts"] if is_loopback(options["host"]) else None,
        status_dir=status_dir,
        triton_metrics=front.metrics if front else "",
        pipelines=pipelines,
        **{name: options[name] for name in _API_OPTIONS},
    )
    listening = {name: options[name] for name in ("host", "port", "exit_timeout", *_TLS)}
    serve(parameters, api, front, workers=workers, workers_note=workers_note, **listening)


def command_line_parameters(context: click.Context, options: dict[str, Any]) -> dict[str, str]:
    """Return the parameters that the command line names."""
    values: dict[str, str] = {}
    for key in DECLARED:
        if context.get_parameter_source(key) is ParameterSource.COMMANDLINE:
            values[key] = options[key]
    return values


def places_of(repository: Path) -> tuple[int, int]:
    """Return how many requests the model in Triton runs, and how many may wait.

    Both are 0 where they depend on the number of GPUs.
    """
    from trtllm_bls.settings.model_config import read_config

    groups = read_config(repository / BLS_NAME / "config.pbtxt").instance_group
    if not groups or any(group.Kind.Name(group.kind) != "KIND_CPU" for group in groups):
        return 0, 0
    count = sum(group.count or 1 for group in groups)
    model = replace(read_parameters(repository, {}), instances=count)
    return count * model.max_running, count * model.max_queued


def read_parameters(repository: Path | None, arguments: dict[str, str]) -> BlsParameters:
    """Read parameters from ``arguments``, the environment and ``repository``, in this order.

    A relative path starts at the current directory, one of the repository's at the repository.
    Raises ``SettingsError``.
    """
    values: dict[str, str] = {}
    base = Path.cwd()
    if repository is not None:
        base = repository
        from trtllm_bls.settings.model_config import read_config, values_of

        try:
            values = values_of(read_config(repository / BLS_NAME / "config.pbtxt"))
        except SettingsError as error:
            raise SettingsError(f"--model-repository: {error}") from error
    for key, value in arguments.items():
        check(BLS_NAME, key, value, DECLARED)
        if value and DECLARED[key].kind in (DIRECTORY, FILE):
            value = os.path.abspath(value)
        values[key] = value
    values["engine_transport"] = "grpc"
    config = {
        "name": BLS_NAME,
        "parameters": {key: {"string_value": value} for key, value in values.items()},
        "model_transaction_policy": {"decoupled": True},
    }
    # A variable of the environment does not win over an argument.
    variables = {DECLARED[key].env for key in arguments}
    environment = {name: text for name, text in os.environ.items() if name not in variables}
    model_arguments = {
        "model_config": json.dumps(config),
        "model_repository": str(base / BLS_NAME),
    }
    return Parameters(model_arguments, environment).read(BlsParameters)
