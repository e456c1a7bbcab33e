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

# They shape what Triton's tensors carry, or choose how to call the engine from inside Triton.
_INSIDE_TRITON = ("accumulate_tokens", "decoupled", "engine_transport")
DECLARED = {
    key: row for key, row in parameters_in(BlsParameters).items() if key not in _INSIDE_TRITON
}
_TLS = ("tls_cert", "tls_key", "tls_client_ca")
# Options that ``ApiSettings`` has as they are.
_OF_API = (
    *("max_body_bytes", "allowed_origins", "tool_parser", "reasoning_parser", "unreadable"),
    *("store_bytes", "store_hours", "store_dir", "lost_items", "share_kv_cache"),
    "pipeline_headers",
)
# The options that ``serve`` has too.
AS_OF_SERVE = (
    *("host", "expose", "api_keys_file", "exit_timeout", *_TLS),
    *("allowed_hosts", "loras", "served_model_names", "chat_template_kwargs", *_OF_API),
)


@dataclass(frozen=True)
class _Options:
    """The options that ``serve`` has not, or spells otherwise."""

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
@options_of(ServeSettings, *AS_OF_SERVE)
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
    repository, workers, why, parameters = options["model_repository"], options["workers"], "", None
    if not (front and front.alone):
        parameters = read_parameters(repository, given_parameters(context, options))
        if workers == "auto":
            remembers = parameters.engine_affinity or parameters.draft_memory_tokens > 0
            workers, why = auto_processes(parameters.max_streams, remembers)
        parameters = replace(parameters, instances=workers)
        if front:
            running, waiting = places_of(repository)
            shares = share_of(running, workers), share_of(waiting, workers)
            front = replace(front, places=shares)
    if parameters and parameters.status_dir and not front:  # else ``serve`` has done so
        try:
            StatusDirectory(parameters.status_dir).forget_drain()
        except OSError as error:
            raise SettingsError(f"status_dir {parameters.status_dir}: {error.strerror}") from error
    from trtllm_bls.settings.model_config import served_pipelines

    own_name = parameters.tokenizer_dir.name if parameters else ""
    api = ApiSettings(
        model_names=options["served_model_names"] or (own_name,),
        keys=keys,
        loras=dict(lora.partition("=")[::2] for lora in options["loras"]),
        chat_template_kwargs=json.loads(options["chat_template_kwargs"]),
        allowed_hosts=options["allowed_hosts"] if is_loopback(options["host"]) else None,
        status_dir=parameters.status_dir if parameters else "",
        triton_metrics=front.metrics if front else "",
        pipelines=served_pipelines(repository) if repository and parameters else (),
        **{name: options[name] for name in _OF_API},
    )
    listening = {name: options[name] for name in ("host", "port", "exit_timeout", *_TLS)}
    serve(parameters, api, front, workers=workers, why=why, **listening)


def given_parameters(context: click.Context, options: dict[str, Any]) -> dict[str, str]:
    """The parameters that the command line names."""
    return {
        key: options[key]
        for key in DECLARED
        if context.get_parameter_source(key) is ParameterSource.COMMANDLINE
    }


def places_of(repository: Path) -> tuple[int, int]:
    """Requests that the model in Triton runs, and that may wait; none: it depends on the GPUs."""
    from trtllm_bls.settings.model_config import read_config

    groups = read_config(repository / BLS_NAME / "config.pbtxt").instance_group
    if not groups or any(group.Kind.Name(group.kind) != "KIND_CPU" for group in groups):
        return 0, 0
    count = sum(group.count or 1 for group in groups)
    model = replace(read_parameters(repository, {}), instances=count)
    return count * model.max_running, count * model.max_queued


def read_parameters(repository: Path | None, given: dict[str, str]) -> BlsParameters:
    """``given``, then the environment, then what ``repository`` has. Raises ``SettingsError``.

    A relative path starts at the current directory, one of the repository's at the repository.
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
    for key, value in given.items():
        check(BLS_NAME, key, value, DECLARED)
        is_path = DECLARED[key].kind in (DIRECTORY, FILE)
        values[key] = os.path.abspath(value) if is_path and value else value
    values["engine_transport"] = "grpc"
    config = {
        "name": BLS_NAME,
        "parameters": {key: {"string_value": value} for key, value in values.items()},
        "model_transaction_policy": {"decoupled": True},
    }
    arguments = {"model_config": json.dumps(config), "model_repository": str(base / BLS_NAME)}
    given_variables = {DECLARED[key].env for key in given}
    environment = {k: v for k, v in os.environ.items() if k not in given_variables}
    return Parameters(arguments, environment).read(BlsParameters)
