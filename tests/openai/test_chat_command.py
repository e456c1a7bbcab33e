"""The terminal chat in a real terminal (a pty), against both kinds of servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pexpect
import pytest
from click.testing import CliRunner
from pexpect.fdpexpect import fdspawn

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from tests.helpers.fake_grpc_server import (
    Fail,
    FakeGrpcServer,
    Hold,
    Say,
    Step,
    in_a_thread,
    inputs_of,
    text,
)
from tests.helpers.openai_server import serving
from tests.helpers.scripted_text import tokenizer
from tests.helpers.waiting import run_async, until
from trtllm_bls.client.terminal_chat import CtrlC, main

CHAT = Path(__file__).parents[2] / "client" / "chat.py"
CTRL_C, CTRL_D = "\x03", "\x04"
PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"

# Makes the terminal that it has as its input its own, so that Ctrl-C reaches it. Tests that a shell
# runs in the background ignore Ctrl-C, and what they start too.
IN_TERMINAL = """
import fcntl, os, signal, struct, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal(fdspawn):
    """The chat in a terminal of its own.

    Not ``pexpect.spawn``: it forks, and a fork of a process with gRPC's threads may die before it
    runs the command.
    """

    def __init__(self, *words: str) -> None:
        ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, str(CHAT), *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        super().__init__(ours, encoding="utf-8", timeout=60)

    def leave(self) -> None:
        """Ctrl-D until the chat ends: a terminal may lose one that comes between two prompts."""
        for _ in range(60):
            self.send(CTRL_D)
            if self.expect([pexpect.EOF, pexpect.TIMEOUT], timeout=1) == 0:
                return
        raise AssertionError("the chat goes on after Ctrl-D")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.close()


Start = Callable[..., Terminal]


def answers(request: Any) -> list[Step]:
    """What the server says to the last message."""
    messages = json.loads(inputs_of(request)["messages"][0][0])
    asked = messages[-1]["content"]
    if asked == "wait":
        return [text("Half of \x1b[2Jit"), Hold()]
    if asked == "fail":
        return [Fail("INVALID_ARG: prompt: is not liked")]
    said = f"**{len(messages)}** messages, the last of {len(asked.splitlines())} lines"
    counts = {"num_input_tokens": 3, "num_output_tokens": 7}
    if asked == "code":
        said = "It is **this**:\nx = 1\n\ndef f():\n    return 1\n\nDone."
    return [text(said, finish_reason="end_id", **counts), Say(final=True)]


@pytest.fixture
def triton() -> Iterator[FakeGrpcServer]:
    with in_a_thread(lambda: FakeGrpcServer(answers)) as server:
        yield server


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def spawn(*words: str) -> Terminal:
            child = Terminal(*words)
            stack.callback(child.end)
            child.expect("> ")
            return child

        yield spawn


def said(server: FakeGrpcServer, place: int = -1) -> list[dict[str, str]]:
    """The conversation of a request."""
    messages: list[dict[str, str]] = json.loads(inputs_of(server.asked[place])["messages"][0][0])
    return messages


def test_a_conversation_goes_on_through_interruptions_and_errors(
    triton: FakeGrpcServer, start: Start, tmp_path: Path
) -> None:
    """The text of an interrupted answer stays; a failed message does not."""
    child = start("--url", triton.url, "--plain", "--system", "Be brief.")
    child.sendline("Hi")
    child.expect(r"\*\*2\*\* messages")
    # A temperature alone would stay greedy.
    sent = inputs_of(triton.asked[-1])
    assert (sent["temperature"], sent["top_p"]) == ([[pytest.approx(0.7)]], [[1.0]])
    child.sendline("wait")
    child.expect("Half of \\[2Jit")  # the escape character does not reach the terminal
    child.send(CTRL_C)
    child.expect("interrupted")
    child.sendline("fail")
    child.expect("error: prompt: is not liked")
    child.sendline("And now?")
    child.expect(r"\*\*6\*\* messages")
    assert [turn["content"] for turn in said(triton)[:1]] == ["Be brief."]
    assert [turn["role"] for turn in said(triton)[-3:]] == ["user", "assistant", "user"]
    assert said(triton)[-2]["content"] == "Half of \x1b[2Jit"
    child.sendline("/stats")
    child.expect("ended: end_id")
    child.expect("tokens: 7 of 512 asked for, 3 in the prompt")
    child.expect("first text: ")
    child.expect("3 answers, 14 tokens")
    for name in ("talk.json", "talk.md"):
        child.sendline(f"/save {tmp_path / name}")
        child.expect("7 messages are in")
    assert json.loads((tmp_path / "talk.json").read_text())[:-1] == said(triton)
    assert "## user\n\nAnd now?" in (tmp_path / "talk.md").read_text()
    child.sendline(f"/save {tmp_path / 'talk.md'}")
    child.expect("7 messages are in")
    (tmp_path / "notes").write_text("of somebody else")
    child.sendline(f"/save {tmp_path / 'notes'}")
    child.expect("exists already; give another name")
    assert (tmp_path / "notes").read_text() == "of somebody else"
    child.sendline("/save /nowhere/at/all")
    child.expect("cannot be written: No such file")
    child.sendline("/system")
    child.expect("there is no system prompt")
    child.sendline("/clear")
    child.expect("begins anew")
    child.sendline("Again")
    child.expect(r"\*\*1\*\* messages")
    child.sendline("/nothing")
    child.expect("/nothing is no command")
    child.sendline("/help")
    child.expect("interrupts an answer")
    child.leave()
    assert child.process.wait(60) == 0
    assert triton.cancels == 1


def test_a_pasted_text_is_one_message_and_markdown_is_rendered(
    triton: FakeGrpcServer, start: Start
) -> None:
    """Line ends in it do not send it; asterisks become bold."""
    child = start("--url", triton.url)
    child.send(f"{PASTE_BEGINS}one\ntwo\nthree{PASTE_ENDS}\r")
    child.expect_exact("\x1b[1m1\x1b[0m messages, the last of 3 lines")
    child.sendline("/exit")
    child.expect(pexpect.EOF)
    assert said(triton)[-1]["content"] == "one\ntwo\nthree"
    assert len(triton.asked) == 1


def test_lines_stay_lines(triton: FakeGrpcServer, start: Start) -> None:
    """Markdown would join them, and take the indentation of code that has no fence."""
    child = start("--url", triton.url)
    child.sendline("code")
    child.expect(r"It is \S*this\S*: *\r\n *x = 1 ")
    child.expect(r"def[^\r]* f[^\r]*\r\n[^\r]*    [^\r]*return")
    child.expect("Done.")


def test_ctrl_c_with_an_openai_api(start: Start) -> None:
    """Ctrl-C at the prompt drops the line; during an answer it frees the engine."""
    script = Script(vocab_size=tokenizer().vocab_size, step_seconds=0.002)
    engine = ScriptedEngine(hashed(600, first=10), script)
    with serving(engine) as api:
        child = start("--url", f"{api.url}/v1", "-o", "100000", "--plain")
        child.send(f"unfinished{CTRL_C}")
        child.expect("Ctrl-D leaves")
        child.sendline("Hi")
        until(lambda: engine.live == 1)
        child.send(CTRL_C)
        child.expect("interrupted")
        until(lambda: engine.live == 0)
        child.leave()
    (request,) = engine.requests
    assert "unfinished" not in tokenizer().decode(request.input_ids)


def test_stats_of_an_openai_api_come_from_its_usage(start: Start) -> None:
    """Without a model named, its first is asked."""
    engine = ScriptedEngine(hashed(600, first=10), Script(vocab_size=tokenizer().vocab_size))
    with serving(engine) as api:
        child = start("--url", f"{api.url}/v1", "-o", "5", "--plain")
        child.sendline("Hi")
        child.sendline("/stats")
        child.expect("ended: length")
        child.expect("tokens: 5 of 5 asked for, [0-9]+ in the prompt")
        child.leave()


class CrLf(BaseHTTPRequestHandler):
    """An OpenAI API whose events end their lines as HTTP does, as many servers' do."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        said = {"delta": {"content": "Hello"}, "finish_reason": "stop"}
        for data in (json.dumps({"choices": [said]}), "[DONE]"):
            self.wfile.write(f"data: {data}\r\n\r\n".encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_events_may_end_lines_with_cr_lf() -> None:
    with HTTPServer(("127.0.0.1", 0), CrLf) as server:
        Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        shown = CliRunner().invoke(main, ["--url", url, "--model", "m"], input="Hi\n")
    assert (shown.exit_code, shown.stdout) == (0, "Hello\n")


def piped(lines: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHAT), *words]
    how: dict[str, Any] = {"errors": "surrogateescape", "text": True}
    return subprocess.run(command, input=lines, capture_output=True, **how, timeout=120)


def test_without_a_terminal_each_line_is_a_message(triton: FakeGrpcServer) -> None:
    """Answers alone are printed; the first failure ends it, with its exit code."""
    shown = piped("Hi\n/exit\n", "--url", triton.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "**1** messages, the last of 1 lines\n"
    failed = piped("fail\nHi\n", "--url", triton.url)
    assert failed.returncode == 1
    assert failed.stderr == "error: prompt: is not liked\n"
    failed = piped("caf\udce9\n", "--url", triton.url)
    assert failed.returncode == 1
    assert failed.stderr.startswith(r"error: messages: '\udce9' at character ")
    assert len(triton.asked) == 2


@pytest.mark.parametrize(
    ("url", "code", "told"),
    [
        ("http://127.0.0.1:1/v1", 3, "error: http://127.0.0.1:1/v1: "),
        ("127.0.0.1:1", 3, "error: 127.0.0.1:1: "),
        ("ftp://127.0.0.1:1", 2, "error: --url ftp://127.0.0.1:1: write http://"),
    ],
)
def test_a_server_that_is_not_there_is_named(url: str, code: int, told: str) -> None:
    """In one line."""
    shown = CliRunner().invoke(main, ["--url", url], input="Hi\n")
    assert shown.exit_code == code
    assert shown.stderr.startswith(told) and shown.stderr.count("\n") == 1


@pytest.mark.parametrize("model", [(), ("--model", "demo")])
@pytest.mark.parametrize("base", ["", "/", "/v2"])
def test_a_url_without_the_apis_path_is_told_by_name(base: str, model: tuple[str, ...]) -> None:
    engine = ScriptedEngine(hashed(600, first=10), Script(vocab_size=tokenizer().vocab_size))
    with serving(engine) as api:
        url = f"{api.url}{base}"
        shown = CliRunner().invoke(main, ["--url", url, *model], input="Hi\n")
        assert shown.exit_code == 2
        assert shown.stderr.startswith(f"error: --url {url}: ")
        assert shown.stderr.endswith("; an OpenAI API's base usually ends in /v1\n")


def test_ctrl_c_drops_a_line_or_stops_an_answer_and_does_nothing_else() -> None:
    """Also between the two, where a second press would end the process and the conversation."""

    async def presses() -> None:
        ctrl_c = CtrlC()
        reading = asyncio.create_task(asyncio.Event().wait())
        signal.raise_signal(signal.SIGINT)
        with ctrl_c.stops(reading) as interrupted:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(asyncio.wait({reading}), 20)
            signal.raise_signal(signal.SIGINT)
            assert reading.cancelled() and interrupted.is_set()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), ctrl_c.drops_line():
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        run_async(presses())
    finally:
        signal.signal(signal.SIGINT, before)
