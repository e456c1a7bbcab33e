"""The command line and its help. Each command's work is imported when it runs."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from trtllm_bls import __version__
from trtllm_bls.errors import TrtllmBlsError
from trtllm_bls.settings import ServeSettings, options_of

_ELSEWHERE = {
    "chat": "trtllm_bls.commands.chat:main",
    "configure": "trtllm_bls.configure.command:command",
    "conformance": "trtllm_bls.doctor:conformance",
    "doctor": "trtllm_bls.doctor:command",
    "drain": "trtllm_bls.commands.drain:command",
    "dynamo": "trtllm_bls.openai.dynamo:command",
    "generate": "trtllm_bls.commands.streaming:main",
    "health": "trtllm_bls.health:command",
    "new": "trtllm_bls.configure.new:command",
    "openai": "trtllm_bls.openai.command:main",
    "recipe": "trtllm_bls.configure.recipe:command",
}
# The settings that ``demo`` has too.
_WHAT_IS_SERVED = (
    *("model", "engine", "draft_model", "model_repository", "server", "threads", "overrides"),
)
_VERBOSE = click.option("--verbose", is_flag=True, help="Show every line of the server's log.")


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
            show_error(Console(stderr=True), error)
            ctx.exit(1)


def show_error(console: Console, error: TrtllmBlsError) -> None:
    """One line that says what to do."""
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


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
    """


@main.command()
@options_of(ServeSettings)
@_VERBOSE
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
@options_of(ServeSettings, *_WHAT_IS_SERVED)
@_VERBOSE
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=320,
    show_default=True,
    help="Longest answer, in tokens.",
)
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
