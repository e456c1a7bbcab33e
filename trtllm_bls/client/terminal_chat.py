"""A conversation in the terminal: what the user types, what is sent, and how answers are shown.

``TritonTextModel`` and ``OpenAIModel`` answer the same conversation with the same events, so that
the rest does not know which API it talks to. While the user types a line, the event loop waits:
reading is plain ``input`` with readline, with history, editing, and pasted text of several lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import signal
import ssl
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from trtllm_bls.client.client import BLS, Client, Event
from trtllm_bls.client.terminal import (
    TEXT_INPUTS,
    ClientReply,
    Exit,
    complain,
    connection_options,
    interruptible,
    open_client,
    program,
    run,
    tensor_options,
)
from trtllm_bls.errors import (
    ConnectionFailed,
    EngineError,
    InvalidRequest,
    Overloaded,
    SettingsError,
    TrtllmBlsError,
)

_READY_S = 10.0
_SAMPLING_FIELDS = ("top_p", "top_k", "seed", "draft_source")  # sent when given
# A model's text may not move the cursor, clear the screen or set the title.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_INDENTED = re.compile(r"\n\s").search
_BRACKETED_PASTE = "\x1b[?2004h"  # readline switches it off with each line that it returns
_COMMANDS = """/help           this list
/system [TEXT]  set the system prompt; without a text, take it away
/stats          figures of the last answer and of the conversation
/save FILE      write the conversation: as JSON if FILE ends in .json, else as Markdown
/clear          forget the conversation; the system prompt stays
/exit           leave, as Ctrl-D does
Ctrl-C interrupts an answer and keeps its text. A pasted text may have several lines."""

Messages = Sequence[Mapping[str, str]]  # those of a conversation, with role and content


@program()
@click.option("--model", help=f"The model to ask ({BLS.name}, or the API's first).")
@click.option("--system", help="The system prompt.")
@click.option("-o", "--max-tokens", type=click.IntRange(1), default=512, show_default=True)
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0 is greedy.")
@tensor_options(BLS, {name: TEXT_INPUTS[name] for name in _SAMPLING_FIELDS})
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key of an OpenAI API.", show_envvar=True)
@click.option("--plain", is_flag=True, help="Show answers as they come, without Markdown.")
@connection_options()
def main(**options: Any) -> None:
    """Chat with a model in the terminal.

    --url is HOST:PORT of Triton's gRPC port, or http://HOST:PORT/v1 of an OpenAI API. Without a
    terminal, each line of standard input is a message. /help lists the commands.

    \b
    Examples:
      trtllm-bls chat
      trtllm-bls chat --url http://127.0.0.1:9000/v1 --system "Answer briefly."
      trtllm-bls chat --temperature 0 --draft-source model --plain
    """

    async def talk() -> Exit:
        async with server_at(options["url"], options["model"], options) as server:
            return await TerminalChat(server, options).talk()

    # Not ``asyncio.run``: with its handler of Ctrl-C, ``input`` would go on.
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        run(lambda: loop.run_until_complete(talk()))


class TerminalChat:
    """A conversation, and the loop that asks for the next message."""

    def __init__(self, server: Server, options: Mapping[str, Any]) -> None:
        self._server = server
        self._max_tokens = options["max_tokens"]
        self._fields: dict[str, Any] = {}
        for name in ("temperature", *_SAMPLING_FIELDS):
            if options[name] is not None:
                self._fields[name] = options[name]
        self._system: str | None = options["system"]
        self._turns: list[dict[str, str]] = []
        self._replies: list[ClientReply] = []
        self._console = Console(highlight=False)
        self._renders = self._console.is_terminal and not options["plain"]
        self._ctrl_c: CtrlC | None = None  # where a person types
        self._own_files: set[Path] = set()  # those that this conversation was saved to

    async def talk(self) -> Exit:
        """Talk until the user leaves. Without a terminal, the first failure ends it."""
        tty = sys.stdin.isatty()
        if tty:
            self._ctrl_c = CtrlC()
            _edit_lines()
            self._say(f"{self._server.model}; /help lists the commands, Ctrl-D leaves")
        for line in _lines(self._ctrl_c):
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            command, _, argument = text.partition(" ")
            if re.fullmatch(r"/\w+", command):
                self._obey(command, argument.strip())
            elif text:
                failure = await self._exchange(line)
                if failure is not None and not tty:
                    return failure
        return Exit.FINISHED

    async def _exchange(self, text: str) -> Exit | None:
        """Ask, and keep the answer; return the exit code of a failure."""
        self._turns.append({"role": "user", "content": text})
        reply = ClientReply(self._max_tokens)
        failure: Exit | None = None
        reading = asyncio.create_task(self._read(reply))
        try:
            with (
                _without_echo(),
                self._interruptible(reading) as interrupted,
                suppress(asyncio.CancelledError),
            ):
                await reading
        except TrtllmBlsError as error:
            failure = complain(error)
        else:
            if interrupted.is_set():
                reply.ended_here = "interrupted"
                self._say("interrupted; the text stays in the conversation")
            self._replies.append(reply)
        if reply.text:
            self._turns.append({"role": "assistant", "content": reply.text})
        else:
            self._turns.pop()
        return failure

    def _interruptible(self, reading: asyncio.Task[None]) -> AbstractContextManager[asyncio.Event]:
        if self._ctrl_c is None:
            return interruptible(reading)
        return self._ctrl_c.stops(reading)

    async def _read(self, reply: ClientReply) -> None:
        """Fill ``reply`` and show it, until it ends or this task is cancelled."""
        answer = self._server.ask(self._messages, self._max_tokens, self._fields)
        with self._display(reply) as show, suppress(asyncio.CancelledError):
            async with aclosing(answer) as events:
                async for event in events:
                    reply.add(event)
                    show(event.text)

    @contextlib.contextmanager
    def _display(self, reply: ClientReply) -> Iterator[Callable[[str], None]]:
        """Show the answer as it grows: as Markdown in a terminal, else text as it comes."""
        if not self._renders:
            yield lambda text: click.echo(_CONTROLS.sub("", text), nl=False)
            click.echo()
            return
        with Live(console=self._console, transient=True, auto_refresh=False) as live:
            yield lambda _: live.update(_tail(reply.text, self._console), refresh=True)
        self._console.print(_markdown(_CONTROLS.sub("", reply.text)))

    @property
    def _messages(self) -> tuple[dict[str, str], ...]:
        if not self._system:
            return tuple(self._turns)
        return ({"role": "system", "content": self._system}, *self._turns)

    def _say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def _obey(self, command: str, argument: str) -> None:
        match command:
            case "/help":
                self._say(_COMMANDS)
            case "/system":
                self._system = argument or None
                if argument:
                    self._say("the system prompt is set")
                else:
                    self._say("there is no system prompt")
            case "/stats":
                lines = []
                if self._replies:
                    lines = self._replies[-1].lines()
                total = sum(reply.completion_tokens or 0 for reply in self._replies)
                lines.append(f"conversation: {len(self._replies)} answers, {total} tokens")
                self._say("\n".join(lines))
            case "/save" if not argument:
                self._say("/save needs a file name")
            case "/save":
                messages = self._messages
                if argument.endswith(".json"):
                    text = json.dumps(messages, indent=1, ensure_ascii=False) + "\n"
                else:
                    parts = (f"## {turn['role']}\n\n{turn['content']}\n" for turn in messages)
                    text = "\n".join(parts)
                try:
                    file = Path(argument).expanduser()
                    mode = "x"  # no file of somebody else is overwritten
                    if file in self._own_files:
                        mode = "w"
                    with file.open(mode, encoding="utf-8", errors="replace") as writer:
                        self._own_files.add(file)
                        writer.write(text)
                except FileExistsError:
                    self._say(f"{argument}: exists already; give another name")
                except OSError as error:
                    self._say(f"{argument}: cannot be written: {error.strerror}")
                except (RuntimeError, ValueError) as error:  # no such home, or no such name
                    self._say(f"{argument}: cannot be written: {error}")
                else:
                    self._say(f"{len(messages)} messages are in {argument}")
            case "/clear":
                self._turns.clear()
                self._replies.clear()
                self._say("the conversation begins anew")
            case _:
                self._say(f"{command} is no command; /help lists them")


class CtrlC:
    """Ctrl-C of a person who chats: it drops the line at the prompt, and stops an answer.

    It never ends the process, which holds the conversation, since people press it twice.
    """

    def __init__(self) -> None:
        self._at_prompt = False
        self._stop: Callable[[], object] | None = None
        signal.signal(signal.SIGINT, self._act)

    @contextlib.contextmanager
    def drops_line(self) -> Iterator[None]:
        """Let Ctrl-C raise ``KeyboardInterrupt``."""
        self._at_prompt = True
        try:
            yield
        finally:
            self._at_prompt = False

    @contextlib.contextmanager
    def stops(self, reading: asyncio.Task[None]) -> Iterator[asyncio.Event]:
        """Let Ctrl-C cancel the task that reads an answer, as ``interruptible`` does."""
        loop = asyncio.get_running_loop()
        with interruptible(reading, (signal.SIGTERM,)) as interrupted:

            def stop() -> None:
                interrupted.set()
                reading.cancel()

            self._stop = lambda: loop.call_soon_threadsafe(stop)
            try:
                yield interrupted
            finally:
                self._stop = None

    def _act(self, number: int, frame: object) -> None:
        if self._at_prompt:
            raise KeyboardInterrupt
        if self._stop is not None:
            self._stop()


def _edit_lines() -> None:
    """Let ``input`` edit lines, keep a history, and take a pasted text as one message.

    Python switches bracketed paste off when it loads readline, and without it each pasted line
    would be sent by itself. A Python without readline has neither.
    """
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Keep keys that are pressed during an answer out of it; the next prompt reads them.

    The terminal still marks a paste by brackets, so that its lines stay one message. It hands over
    each key by itself: a line that it collects would lose what is beyond 4,096 bytes.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    attributes = termios.tcgetattr(terminal)
    silent = termios.tcgetattr(terminal)
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent)
    if "readline" in sys.modules and sys.stdout.isatty():
        click.echo(_BRACKETED_PASTE, nl=False)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)


def _lines(ctrl_c: CtrlC | None) -> Iterator[str]:
    """Yield the user's messages; Ctrl-C at the prompt, where there is one, drops the line."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text are refused as a message
        sys.stdin.reconfigure(errors="surrogateescape")
    if ctrl_c is None:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            with ctrl_c.drops_line():
                line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D leaves)")
        else:
            yield line


def _markdown(text: str) -> Markdown:
    """Render ``text`` with its line ends: models seldom mean Markdown's long lines.

    A paragraph with indented lines is code without a fence, and shown as it is.
    """
    markdown = Markdown(text)
    tokens: list[Any] = []
    for token in markdown.parsed:
        if (
            token.type == "inline"
            and tokens[-1].type == "paragraph_open"
            and _INDENTED(token.content)
        ):
            tokens[-1] = replace(token, type="code_block", tag="code", children=None)
        elif token.type != "paragraph_close" or tokens[-1].type != "code_block":
            tokens.append(token)
        for part in token.children or ():
            part.type = part.type.replace("softbreak", "hardbreak")
    markdown.parsed = tokens
    return markdown


def _tail(text: str, console: Console) -> Text:
    """Return as much of the end as fits the screen; scrolled lines cannot be drawn again."""
    height = max(1, console.height - 2)
    visible = Text(_CONTROLS.sub("", text[-console.width * height :]))
    return Text("\n").join(visible.wrap(console, console.width)[-height:])


# --- the two APIs -----------------------------------------------------------------------------


@dataclass
class TritonTextModel:
    """``tensorrt_llm_bls``, or another model with its tensors, over gRPC.

    ``ask`` yields the answer as it comes, and raises an error of the server's; closing it ends the
    server's work. ``fields`` have their names in OpenAI's API, which are the tensors' names too.
    """

    client: Client
    model: str

    async def ask(
        self, messages: Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        conversation = json.dumps(messages, ensure_ascii=False)
        tensors: dict[str, Any] = {"messages": conversation, "max_tokens": max_tokens}
        tensors |= {"return_num_input_tokens": True, "return_num_output_tokens": True, **fields}
        if fields.get("temperature") and not fields.keys() & {"top_k", "top_p"}:
            tensors["top_p"] = 1.0  # a temperature alone stays greedy there
        async with self.client.stream(self.model, **tensors) as stream:
            async for event in stream:
                yield event


@dataclass
class OpenAIModel:
    """A model behind OpenAI's API, ours or another's.

    ``ask`` raises ``InvalidRequest``, ``Overloaded`` and ``EngineError`` as the server answers,
    ``ConnectionFailed`` where it cannot be reached or ends before its last event.
    """

    http: httpx.AsyncClient
    url: str
    model: str

    async def first_model(self) -> str:
        """Return the first model that the server names."""
        async with self._response("GET", "models") as response:
            body = await response.aread()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EngineError(f"{self.url}/models: names no model") from None

    async def ask(
        self, messages: Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> AsyncGenerator[Event, None]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        body["messages"] = messages
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        incomplete = b""
        has_finished = False
        async with self._response("POST", "chat/completions", json.dumps(body)) as response:
            # Not httpx's ``aiter_lines``: it also splits at U+2028, which JSON may hold as it is.
            async for part in response.aiter_bytes():
                *blocks, incomplete = (incomplete + part).replace(b"\r\n", b"\n").split(b"\n\n")
                for block in blocks:
                    if not block.startswith(b"data:"):
                        continue
                    data = block[5:]
                    if data.strip() == b"[DONE]":
                        if has_finished:
                            return
                        raise ConnectionFailed(f"{self.url}: the answer has no finish_reason")
                    event = self._event(data)
                    has_finished = has_finished or event.finish_reason is not None
                    yield event
        raise ConnectionFailed(f"{self.url}: the answer ended before its last event")

    def _event(self, data: bytes) -> Event:
        now = time.perf_counter()
        try:
            event = json.loads(data)
            if event.get("error"):
                raise _refusal(500, data)
            usage = event.get("usage") or {}
            choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("refusal") or ""
        except (ValueError, AttributeError):
            raise EngineError(f"{self.url}: an event cannot be read: {data[:80]!r}") from None
        return Event(
            texts=(text,),
            received_at=now,
            finish_reason=choice.get("finish_reason"),
            num_input_tokens=usage.get("prompt_tokens"),
            num_output_tokens=usage.get("completion_tokens"),
        )

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, body: str | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Yield the response, its body not yet read; leaving closes the connection."""
        try:
            async with self.http.stream(method, path, content=body) as response:
                if response.status_code == 200:
                    yield response
                    return
                refusal = _refusal(response.status_code, await response.aread())
        except httpx.ConnectError as error:
            raise ConnectionFailed(
                f"{self.url}: {error}; `trtllm-bls serve` starts a server"
            ) from error
        except httpx.HTTPError as error:
            raise ConnectionFailed(f"{self.url}: {error}") from error
        if response.status_code == 404 and not self.url.rstrip("/").endswith("/v1"):
            raise SettingsError(
                f"--url {self.url}: {refusal}; an OpenAI API's base usually ends in /v1"
            )
        raise refusal


def _refusal(status: int, body: bytes) -> TrtllmBlsError:
    """Make one of our errors of a server's answer."""
    message = f"the server answered {status}"
    field = "request"
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        error = json.loads(body)["error"]
        message = str(error["message"])
        field = str(error.get("param") or field)
    if status in (429, 503):
        return Overloaded(message)
    if 400 <= status < 500:
        return InvalidRequest(field, message.removeprefix(f"{field}: "))
    return EngineError(message)


Server = TritonTextModel | OpenAIModel


@asynccontextmanager
async def server_at(
    url: str, model: str | None, options: Mapping[str, Any]
) -> AsyncIterator[Server]:
    """Open the server at ``url``, with the API key, the TLS and the retries of the options.

    ``host:port`` is Triton's gRPC, ``http://HOST:PORT/v1`` an OpenAI API's base. The default of
    ``model`` is ``tensorrt_llm_bls``, or the first that an API names. Opening raises
    ``TrtllmBlsError`` where that already shows a problem. For use in one event loop.
    """
    if "://" not in url:
        async with open_client(url, options) as client:
            text_model = TritonTextModel(client, model or BLS.name)
            if not client.retries:  # else the first request may wait for the server
                await client.model_ready(text_model.model, _READY_S)
            yield text_model
        return
    # A compressed stream would arrive in larger pieces.
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if options["api_key"]:
        headers["authorization"] = f"Bearer {options['api_key']}"
    try:
        base = httpx.URL(url)
        usable = base.scheme in ("http", "https") and base.host and (base.port or 0) < 65536
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise SettingsError(f"--url {url}: write http://HOST:PORT/v1, or HOST:PORT for gRPC")
    async with httpx.AsyncClient(
        base_url=base,
        headers=headers,
        verify=ssl.create_default_context(),
        trust_env=False,  # no proxy stands between the clock and the server
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    ) as http:
        api = OpenAIModel(http, url, model or "")
        api.model = model or await api.first_model()
        yield api
