"""A conversation in the terminal: what the user types, and how answers are shown.

What is sent is ``servers``' business. The event loop runs only while an answer comes, so that
reading a line is plain ``input`` with readline: history, editing, and pasted text of several lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from trtllm_bls.commands.reply import Reply
from trtllm_bls.commands.servers import Server, server_at
from trtllm_bls.commands.terminal import (
    Exit,
    Interruption,
    complain,
    connection_options,
    program,
    run,
)
from trtllm_bls.errors import TrtllmBlsError

# A model's text may not move the cursor, clear the screen or set the title.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_INDENTED = re.compile(r"\n\s").search
_COMMANDS = """/help           this list
/system [TEXT]  set the system prompt; without a text, take it away
/stats          figures of the last answer and of the conversation
/save FILE      write the conversation: as JSON if FILE ends in .json, else as Markdown
/clear          forget the conversation; the system prompt stays
/exit           leave, as Ctrl-D does
Ctrl-C interrupts an answer and keeps its text. A pasted text may have several lines."""


@program()
@click.option("--model", help="The model to ask (tensorrt_llm_bls, or the API's first).")
@click.option("--system", help="The system prompt.")
@click.option("-o", "--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0 is greedy.")
@click.option(
    "--top-p",
    type=float,
    help="Choose among the likeliest tokens that together reach this probability.",
)
@click.option("--top-k", type=int, help="Choose among the k likeliest tokens.")
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option(
    "--draft-source", help="Speculation: where drafts come from (off, model, ngram, ...)."
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key of an OpenAI API.", show_envvar=True)
@click.option("--plain", is_flag=True, help="Show answers as they come, without Markdown.")
@connection_options()
def main(**given: Any) -> None:
    """Chat with a model in the terminal.

    --url is HOST:PORT of Triton's gRPC port, or http://HOST:PORT/v1 of an OpenAI API. Without a
    terminal, each line of standard input is a message. /help lists the commands.

    \b
    Examples:
      trtllm-bls chat
      trtllm-bls chat --url http://127.0.0.1:9000/v1 --system "Answer briefly."
      trtllm-bls chat --temperature 0 --draft-source model --plain
    """
    run(lambda: _talk(given))


def _talk(given: dict[str, Any]) -> Exit:
    opened = contextlib.AsyncExitStack()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        at = server_at(given["url"], given["model"], given)
        server = loop.run_until_complete(opened.enter_async_context(at))
        try:
            return Conversation(server, given, loop).talk()
        finally:
            loop.run_until_complete(opened.aclose())


class Conversation:
    """What was said so far, and the loop that asks for more."""

    def __init__(
        self, server: Server, given: dict[str, Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._server = server
        self._loop = loop
        self._max_tokens = given["max_tokens"]
        names = ("temperature", "top_p", "top_k", "seed", "draft_source")
        self._fields = {name: given[name] for name in names if given[name] is not None}
        self._system: str | None = given["system"]
        self._turns: list[dict[str, str]] = []
        self._replies: list[Reply] = []
        self._console = Console(highlight=False)
        self._rich = self._console.is_terminal and not given["plain"]
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(_COMMANDS),
            "/system": self._set_system,
            "/stats": lambda _: self._stats(),
            "/save": self._save,
            "/clear": lambda _: self._clear(),
        }

    @property
    def _messages(self) -> tuple[dict[str, str], ...]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return (*system, *self._turns)

    def talk(self) -> Exit:
        """Until the user leaves. Without a terminal, the first failure ends it."""
        tty = sys.stdin.isatty()
        if tty:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() edits lines with it from then on)
            self._say(f"{self._server.model}; /help lists the commands, Ctrl-D leaves")
        for line in _lines(tty):
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            command, _, argument = text.partition(" ")
            if command in self._commands:
                self._commands[command](argument.strip())
            elif re.fullmatch(r"/\w+", command):
                self._say(f"{command} is no command; /help lists them")
            elif text:
                failed = self._exchange(line)
                if failed is not None and not tty:
                    return failed
        return Exit.FINISHED

    # --- one answer ---------------------------------------------------------------------------

    def _exchange(self, text: str) -> Exit | None:
        """Ask, and keep what came; the exit code of a failure."""
        self._turns.append({"role": "user", "content": text})
        reply, failure = Reply(self._max_tokens), None
        try:
            if self._loop.run_until_complete(self._answer(reply)):
                reply.ended_here = "interrupted"
                self._say("interrupted; the text stays in the conversation")
        except TrtllmBlsError as error:
            failure = complain(error)
        else:
            self._replies.append(reply)
        if reply.text:
            self._turns.append({"role": "assistant", "content": reply.text})
        else:
            self._turns.pop()
        return failure

    async def _answer(self, reply: Reply) -> bool:
        """Fill ``reply`` and show it; whether the user interrupted it."""
        work = asyncio.create_task(self._read(reply))
        interruption = Interruption()
        with interruption.cancels(work):
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()
        return interruption.happened

    async def _read(self, reply: Reply) -> None:
        asked = self._server.ask(self._messages, self._max_tokens, self._fields)
        with self._display(reply) as show, contextlib.suppress(asyncio.CancelledError):
            async with aclosing(asked) as events:
                async for event in events:
                    reply.add(event)
                    show(event.text)

    @contextlib.contextmanager
    def _display(self, reply: Reply) -> Iterator[Callable[[str], None]]:
        """Shows the answer as it grows: as Markdown in a terminal, else text as it comes."""
        if not self._rich:
            yield lambda text: click.echo(_CONTROLS.sub("", text), nl=False)
            click.echo()
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            yield lambda _: live.update(_tail(reply.text, self._console), refresh=True)
        self._console.print(_markdown(_CONTROLS.sub("", reply.text)))

    # --- commands -----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._say("the system prompt is set" if text else "there is no system prompt")

    def _clear(self) -> None:
        self._turns.clear()
        self._replies.clear()
        self._say("the conversation begins anew")

    def _stats(self) -> None:
        total = sum(reply.completion_tokens or 0 for reply in self._replies)
        conversation = f"conversation: {len(self._replies)} answers, {total} tokens"
        last = self._replies[-1].lines() if self._replies else []
        self._say("\n".join([*last, conversation]))

    def _save(self, name: str) -> None:
        if not name:
            self._say("/save needs a file name")
            return
        messages = self._messages
        if name.endswith(".json"):
            text = json.dumps(messages, indent=1, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"## {turn['role']}\n\n{turn['content']}\n" for turn in messages)
        try:
            Path(name).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            self._say(f"{name}: cannot be written: {error.strerror}")
        else:
            self._say(f"{len(messages)} messages are in {name}")


def _markdown(text: str) -> Markdown:
    """``text`` rendered, with its line ends: models seldom mean Markdown's long lines.

    A paragraph with indented lines is code without a fence, and shown as it is.
    """
    shown = Markdown(text)
    kept: list[Any] = []
    for token in shown.parsed:
        if (
            token.type == "inline"
            and kept[-1].type == "paragraph_open"
            and _INDENTED(token.content)
        ):
            kept[-1] = replace(token, type="code_block", tag="code", children=None)
        elif token.type != "paragraph_close" or kept[-1].type != "code_block":
            kept.append(token)
        for part in token.children or ():
            part.type = part.type.replace("softbreak", "hardbreak")
    shown.parsed = kept
    return shown


def _lines(tty: bool) -> Iterator[str]:
    """What the user types, message by message; Ctrl-C at the prompt drops the line."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is not text is refused as a message
        sys.stdin.reconfigure(errors="surrogateescape")
    if not tty:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")


def _tail(text: str, console: Console) -> Text:
    """As much of the end as fits the screen: what has scrolled off cannot be drawn again."""
    height = max(1, console.height - 2)
    visible = Text(_CONTROLS.sub("", text[-console.width * height :]))
    return Text("\n").join(visible.wrap(console, console.width)[-height:])
