"""The command line: options and help. Each command's work is imported when it runs.

Owns the spelling of options; their defaults are those of ``settings``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from trtllm_bls import __version__
from trtllm_bls.chat_parsing import REASONING_TAGS, TOOL_FORMATS
from trtllm_bls.errors import SettingsError, TrtllmBlsError
from trtllm_bls.settings import Override, ServeSettings

_ELSEWHERE = {
    "benchmark": "trtllm_bls.commands.benchmark:main",
    "chat": "trtllm_bls.commands.chat:main",
    "configure": "trtllm_bls.configure:command",
    "doctor": "trtllm_bls.doctor:command",
    "drain": "trtllm_bls.commands.drain:command",
    "generate": "trtllm_bls.commands.streaming:main",
    "health": "trtllm_bls.health.command:command",
    "openai": "trtllm_bls.openai.command:main",
    "recipe": "trtllm_bls.configure.recipe_command:command",
}
_DEFAULTS = ServeSettings()
_PATH = click.Path(path_type=Path)
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Commands(click.Group):
    """Imports commands that live elsewhere on first use; shows our errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = _ELSEWHERE[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TrtllmBlsError as error:
            from trtllm_bls.launcher.terminal import show_error

            show_error(Console(stderr=True), error)
            ctx.exit(1)


def _setting(name: str, help: str, **more: Any) -> Callable[[_Command], _Command]:
    """An option for one field of ``ServeSettings``, with its default."""
    default = getattr(_DEFAULTS, name)
    if default is not None:
        more |= {"default": default, "show_default": True}
    return click.option("--" + name.replace("_", "-"), name, help=help, **more)


def _model_settings(command: _Command) -> _Command:
    """The options that choose a server and what it runs."""
    for option in reversed(
        (
            _setting(
                "model", "Checkpoint directory of the model (default: the demo's).", type=_PATH
            ),
            _setting(
                "engine",
                "Engine to use instead of one in this server: trtllm://HOST:PORT (trtllm-serve "
                "--grpc), triton+grpc://HOST:PORT/MODEL, several with commas; or triton:MODEL. "
                "--model then only names a tokenizer.",
            ),
            _setting("draft_model", "Checkpoint directory of the draft model.", type=_PATH),
            _setting("model_repository", "Model repository (default: our own).", type=_PATH),
            _setting("server", "tritonserver: its directory or its binary.", type=_PATH),
            _setting("threads", "CPU threads of each embedded engine.", type=int),
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="MODEL.PARAMETER=VALUE",
                callback=_parse_overrides,
                help="Replace a parameter of a model's configuration; may be repeated.",
            ),
            click.option("--verbose", is_flag=True, help="Show every line of the server's log."),
        )
    ):
        command = option(command)
    return command


def _parse_overrides(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[Override, ...]:
    try:
        return tuple(Override.parse(value) for value in values)
    except SettingsError as error:
        raise click.UsageError(str(error), ctx) from error


def _parse_instances(ctx: click.Context, value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not value.isdecimal():
        raise click.UsageError(f"--bls-instances {value!r}: use a number or auto", ctx)
    return int(value)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trtllm-bls")
def main() -> None:
    """TensorRT-LLM on Triton: exact streaming text, speculation, cancellation.

    \b
    Examples:
      trtllm-bls demo                   three prompts through a real server
      trtllm-bls serve                  keep a server up on ports 8000 to 8002
      trtllm-bls serve --model ./llama  serve your own checkpoint
      trtllm-bls generate "Hello"       text from a server on port 8001
      trtllm-bls chat                   a conversation with it
      trtllm-bls benchmark              how many tokens a second, how soon
    """


@main.command()
@_model_settings
@_setting("host", "Address to listen on.")
@_setting("expose", "Allow a --host that other machines can reach.", is_flag=True)
@_setting("http_port", "HTTP port; 0 = any free port.")
@_setting("grpc_port", "gRPC port; 0 = any free port.")
@_setting("metrics_port", "Metrics port; 0 = any free port.")
@_setting("health_port", "Port of /health/live, /health/ready, /health/startup; 0 = any free port.")
@_setting("openai_port", "Port of the OpenAI API; 0 = none.")
@_setting("openai_workers", "Processes of the OpenAI API.")
@_setting(
    "api_keys_file", "Keys that clients of the OpenAI API must bring, one a line.", type=_PATH
)
@_setting(
    "tool_parser",
    "How the model writes tool calls, for the OpenAI API; auto: by its chat template.",
    type=click.Choice(["auto", "none", *TOOL_FORMATS]),
)
@_setting(
    "reasoning_parser",
    "How the model marks reasoning, for the OpenAI API; auto: by its chat template.",
    type=click.Choice(["auto", "none", *REASONING_TAGS]),
)
@_setting("max_streams", "Requests that may run at once.")
@_setting(
    "bls_instances",
    "Processes of tensorrt_llm_bls: a number, or auto (by the number of cores).",
    metavar="N|auto",
    callback=lambda ctx, param, value: _parse_instances(ctx, value),
)
@_setting(
    "decoupled",
    "Whether tensorrt_llm_bls streams; false allows unary requests instead.",
    type=bool,
)
@_setting(
    "open_control_apis",
    "Leave Triton's shared-memory, model-repository, logging and trace APIs open to clients.",
    is_flag=True,
)
@_setting("tls_cert", "Certificate of the gRPC, HTTP and OpenAI API ports, in PEM.", type=_PATH)
@_setting("tls_key", "Key of --tls-cert, in PEM.", type=_PATH)
@_setting(
    "tls_client_ca",
    "Whose certificates the clients of these ports must show, in PEM.",
    type=_PATH,
)
@_setting("exit_timeout", "Seconds that running requests have to end when stopping.")
@_setting("ready_timeout", "Seconds that the models have to load.")
@_setting(
    "stall_timeout",
    "Seconds without any progress after which the server is not ready; after twice as long it "
    "has failed.",
)
@_setting(
    "on_failure",
    "What to do when the server or one of its processes dies, stops or is stuck.",
    type=click.Choice(["restart", "exit"]),
)
@_setting("log_file", "Append the server's whole log to this file.", type=_PATH)
def serve(verbose: bool, **options: Any) -> None:
    """Serve a model until Ctrl-C or SIGTERM; a second one does not wait for running requests.

    \b
    Examples:
      trtllm-bls serve
      trtllm-bls serve --model ./llama --draft-model ./llama-small
      trtllm-bls serve --http-port 7000 --grpc-port 7001 --metrics-port 7002
      trtllm-bls serve --set tensorrt_llm.max_batch=8 --log-file triton.log
    """
    from trtllm_bls.launcher.serve import serve as run

    sys.exit(run(ServeSettings(**options), verbose=verbose))


@main.command()
@_model_settings
@click.option("--max-tokens", default=320, show_default=True, help="Longest answer, in tokens.")
def demo(verbose: bool, max_tokens: int, **options: Any) -> None:
    """Start a server on free ports, show answers as they stream, stop it.

    \b
    Examples:
      trtllm-bls demo
      trtllm-bls demo --model ./llama --max-tokens 200
    """
    from trtllm_bls.launcher.demo import demo as run

    settings = ServeSettings(**options, http_port=0, grpc_port=0, metrics_port=0, openai_port=0)
    sys.exit(run(settings, max_tokens=max_tokens, verbose=verbose))


if __name__ == "__main__":
    main()
