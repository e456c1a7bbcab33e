"""The command line. Each command is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from trtllm_bls import __version__
from trtllm_bls.errors import TrtllmBlsError

_COMMANDS = {
    "chat": "trtllm_bls.commands.chat:main",
    "configure": "trtllm_bls.configure.command:command",
    "conformance": "trtllm_bls.doctor:conformance",
    "demo": "trtllm_bls.launcher.serve:demo",
    "doctor": "trtllm_bls.doctor:command",
    "drain": "trtllm_bls.commands.drain:command",
    "dynamo": "trtllm_bls.openai.dynamo:command",
    "generate": "trtllm_bls.commands.streaming:main",
    "health": "trtllm_bls.health:command",
    "new": "trtllm_bls.configure.new:command",
    "openai": "trtllm_bls.openai.command:main",
    "recipe": "trtllm_bls.configure.recipe:command",
    "serve": "trtllm_bls.launcher.serve:command",
}


class Commands(click.Group):
    """Imports a command on first use; shows our errors without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _, attribute = _COMMANDS.get(cmd_name, "").partition(":")
        return getattr(importlib.import_module(module), attribute) if module else None

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


if __name__ == "__main__":
    main()
