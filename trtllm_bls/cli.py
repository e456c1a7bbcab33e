"""The command line: the table of commands, and the hints for commands that were mistyped.

A command's module is imported when the command runs. The list of commands needs none of them, so
`trtllm-bls --help` stays fast.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from trtllm_bls.errors import SetupError, TrtllmBlsError
from trtllm_bls.garbage import end_without_collections, no_collections
from trtllm_bls.orchestrator.output import StreamName, checked_output, queued_output
from trtllm_bls.settings.parent import end_with_parent
from trtllm_bls.text.template_trial import NO_FORK_HANDLERS


class Entry(NamedTuple):
    """A command: where its function is, and its line in the list of commands."""

    function: str  # "module:name"
    line: str  # at most 60 characters: it fits a terminal of 80 columns


_SECTIONS: dict[str, dict[str, Entry]] = {
    "Try it": {
        "demo": Entry(
            "trtllm_bls.operate.serve_command:demo", "Stream three answers from a real server."
        ),
        "serve": Entry("trtllm_bls.operate.serve_command:command", "Serve a model until Ctrl-C."),
        "chat": Entry("trtllm_bls.client.terminal_chat:main", "Chat in the terminal."),
        "generate": Entry(
            "trtllm_bls.client.terminal_generate:main", "Send a prompt, show the answer."
        ),
    },
    "Deploy": {
        "recipe": Entry(
            "trtllm_bls.configure.recipe:command", "Print the commands that build an engine."
        ),
        "configure": Entry(
            "trtllm_bls.configure.configure_command:command", "Write a model repository."
        ),
        "upgrade": Entry(
            "trtllm_bls.configure.upgrade:command", "Bring a repository to this version."
        ),
        "new": Entry("trtllm_bls.configure.new:command", "Write a pipeline of your own."),
        "openai": Entry(
            "trtllm_bls.openai.openai_command:main", "Serve OpenAI's API in front of an engine."
        ),
        "dynamo": Entry(
            "trtllm_bls.openai.dynamo:command", "Answer Dynamo's front end (deprecated)."
        ),
    },
    "Operate": {
        "doctor": Entry("trtllm_bls.operate.doctor:command", "Find what would go wrong."),
        "health": Entry("trtllm_bls.operate.health:command", "Check that a server can answer."),
        "drain": Entry("trtllm_bls.operate.drain:command", "Let a server finish and stop."),
        "prove": Entry("trtllm_bls.operate.prove:command", "Examine a deployment, write a report."),
        "conformance": Entry(
            "trtllm_bls.operate.doctor:conformance", "Ask an engine for known answers (deprecated)."
        ),
    },
    "This program": {
        "help": Entry("trtllm_bls.cli:show_help", "Show the help of a command."),
        "version": Entry("trtllm_bls.cli:show_version", "Print the version."),
        "completion": Entry("trtllm_bls.cli:completion", "Print a completion script for a shell."),
    },
}
_ENTRIES: dict[str, Entry] = {}
for _section in _SECTIONS.values():
    _ENTRIES |= _section

# Options that other servers have, by command, and ours in their place.
_OPTION_HINTS = {
    ("serve", "--port"): (
        "--openai-port is OpenAI's API, --http-port and --grpc-port are Triton's"
    ),
    ("serve", "--workers"): "--openai-workers and --bls-instances are numbers of processes",
    ("generate", "--text"): "the prompt is an argument: trtllm-bls generate 'Once upon a time'",
}

# Streams whose slow reader must not make a command wait. The first three commands serve requests
# until they are told to stop. The others start a server; they do wait until their result is read.
_QUEUED: dict[str, tuple[StreamName, ...]] = {
    "dynamo": ("stdout", "stderr"),
    "openai": ("stdout", "stderr"),
    "serve": ("stdout", "stderr"),
    "demo": ("stderr",),
    "prove": ("stderr",),
}


class Commands(click.Group):
    """The commands by name. A command's module is imported when the command is used.

    Errors of this package, files that cannot be used and output that cannot be written become one
    line on standard error and exit code 1.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_ENTRIES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _ENTRIES.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.function.partition(":")
        with no_collections():
            command: click.Command = getattr(importlib.import_module(module), attribute)
        command.short_help = entry.line
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        for title, section in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, entry.line) for name, entry in section.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        name = args[0]
        if name not in _ENTRIES and not name.startswith("-"):
            hint = "see `trtllm-bls help`"
            if matches := difflib.get_close_matches(name, _ENTRIES, n=1, cutoff=0.5):
                hint = f"did you mean {matches[0]!r}?"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            command = ""
            if error.ctx is not None:
                command = error.ctx.info_name or ""
            hint = _OPTION_HINTS.get((command, error.option_name))
            if hint is None:
                raise
            message = f"no option {error.option_name}; {hint}"
            raise click.UsageError(message, error.ctx) from error

    def main(self, args: Sequence[str] | None = None, *arguments: Any, **options: Any) -> Any:
        if args is None:
            args = sys.argv[1:]
        words = list(args)
        names = [word for word in words if not word.startswith("-")]
        queued: tuple[StreamName, ...] = ()
        if names and "-h" not in words and "--help" not in words:
            queued = _QUEUED.get(names[0], ())
        with queued_output(*queued):
            try:
                with checked_output():
                    return super().main(words, *arguments, **options)
            except TrtllmBlsError as error:
                show_error(error)
            except OSError as error:
                problem = str(error.strerror or error)
                if error.filename:
                    problem = f"{error.filename}: {problem}"
                show_error(SetupError(problem))
            except Exception:
                if not queued:
                    raise
                traceback.print_exc()  # Python itself would write to the stream that may block.
            sys.exit(1)


def show_error(error: TrtllmBlsError) -> None:
    """Write one line that says what to do on standard error."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(str(error), err=True)


def _print_version() -> None:
    from trtllm_bls.operate.version import version_text

    click.echo(f"trtllm-bls, version {version_text()}")


def _version_option(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set:
        _print_version()
        ctx.exit()


def _end_with_parent(ctx: click.Context, param: click.Parameter, parent: int | None) -> None:
    if parent is not None:
        end_with_parent(parent)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version_option,
    help="Print the version and, where it is known, the commit.",
)
@click.option(
    "--exit-with-parent",
    type=int,
    metavar="PID",
    hidden=True,
    is_eager=True,
    expose_value=False,
    callback=_end_with_parent,
)
def main() -> None:
    """TensorRT-LLM on Triton: exact streaming text, speculation, cancellation.

    \b
    Examples:
      trtllm-bls demo                   three prompts through a real server
      trtllm-bls serve                  a server on ports 8000 to 8003 and 9000
      trtllm-bls serve --model ./llama  serve your own checkpoint
      trtllm-bls generate "Hello"       text from a server on port 8001
      trtllm-bls chat                   a conversation with it
    """
    end_without_collections()
    for variable, value in NO_FORK_HANDLERS.items():
        os.environ.setdefault(variable, value)


# --- commands about this program --------------------------------------------------------------


@click.command()
@click.argument("name", required=False)
@click.pass_context
def show_help(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of the whole program.

    \b
    Examples:
      trtllm-bls help
      trtllm-bls help serve
    """
    top = ctx.find_root()
    if name is None:
        click.echo(top.get_help())
        return
    _, command, _ = main.resolve_command(top, [name])
    assert command is not None, name
    click.echo(command.get_help(click.Context(command, parent=top, info_name=name)))


@click.command()
def show_version() -> None:
    """Print the version and, where it is known, the commit.

    \b
    Examples:
      trtllm-bls version
    """
    _print_version()


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    Write it where your shell looks for completions, for bash into
    ~/.local/share/bash-completion/completions/trtllm-bls.

    \b
    Examples:
      trtllm-bls completion bash
      trtllm-bls completion zsh
      trtllm-bls completion fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None, shell
    click.echo(script(main, {}, "trtllm-bls", "_TRTLLM_BLS_COMPLETE").source())


if __name__ == "__main__":
    main(prog_name="trtllm-bls")
