"""The command line. Each command is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from trtllm_bls.errors import TrtllmBlsError

_COMMANDS = {
    "chat": "trtllm_bls.client.terminal_chat:main",
    "configure": "trtllm_bls.configure.configure_command:command",
    "conformance": "trtllm_bls.operate.doctor:conformance",
    "demo": "trtllm_bls.operate.serve:demo",
    "doctor": "trtllm_bls.operate.doctor:command",
    "drain": "trtllm_bls.operate.drain:command",
    "dynamo": "trtllm_bls.openai.dynamo:command",
    "generate": "trtllm_bls.client.terminal_generate:main",
    "health": "trtllm_bls.operate.health:command",
    "new": "trtllm_bls.configure.new:command",
    "openai": "trtllm_bls.openai.openai_command:main",
    "prove": "trtllm_bls.operate.prove:command",
    "recipe": "trtllm_bls.configure.recipe:command",
    "serve": "trtllm_bls.operate.serve:command",
    "upgrade": "trtllm_bls.configure.upgrade:command",
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


def _print_version(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set:
        from trtllm_bls.operate.checks import version_text

        click.echo(f"trtllm-bls, version {version_text()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version, and the commit where the installation knows it.",
)
def main() -> None:
    """TensorRT-LLM on Triton: exact streaming text, speculation, cancellation.

    \b
    Examples:
      trtllm-bls demo                   three prompts through a real server
      trtllm-bls serve                  keep a server up on ports 8000 to 8003 and 9000
      trtllm-bls serve --model ./llama  serve your own checkpoint
      trtllm-bls generate "Hello"       text from a server on port 8001
      trtllm-bls chat                   a conversation with it
    """


if __name__ == "__main__":
    main()
