"""The terminal chat in tmux: a terminal that pastes and shows the screen as a person's does."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_grpc_server import (
    FakeGrpcServer,
    Say,
    Step,
    Until,
    in_a_thread,
    inputs_of,
    text,
)
from tests.helpers.waiting import until

CHAT = Path(__file__).parents[2] / "client" / "chat.py"
HAS_TMUX = shutil.which("tmux") is not None
pytestmark = pytest.mark.skipif(not HAS_TMUX, reason="no tmux: `apt-get install tmux` runs it")


class Tmux:
    """A tmux server of its own with one window, 80 columns by 24 lines, that runs a command."""

    def __init__(self, socket: Path, command: str) -> None:
        self._socket = str(socket)
        self.do("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", command)

    def do(self, *words: str, input: str | None = None) -> str:
        """Run a tmux command and return its output."""
        command = ["tmux", "-S", self._socket, *words]
        done = subprocess.run(
            command, input=input, capture_output=True, text=True, timeout=240, check=True
        )
        return done.stdout

    def screen(self) -> str:
        """Return the lines on the screen and above it, without blanks at their ends."""
        return self.do("capture-pane", "-p", "-S", "-").rstrip()

    def type(self, keys: str) -> None:
        self.do("send-keys", "-l", keys)

    def press(self, key: str) -> None:
        self.do("send-keys", key)

    def paste(self, content: str) -> None:
        """Paste as a terminal does: in brackets only where the program has asked for them."""
        self.do("load-buffer", "-", input=content)
        self.do("paste-buffer", "-p")

    def takes_keys(self) -> None:
        """Wait until the program sleeps at an empty prompt, and no Ctrl-C is on its way to it.

        A Ctrl-C overtakes the keys that were typed before the program saw it, on a busy machine.
        The empty line takes one that Python has noted and not told.
        """
        pid = self.do("display-message", "-p", "#{pane_pid}").strip()
        status = Path(f"/proc/{pid}/status")

        def sleeps() -> bool:
            words = status.read_text().split()
            signals = int(words[words.index("ShdPnd:") + 1], 16)
            is_asleep = words[words.index("State:") + 1] == "S"
            return is_asleep and not signals and self.screen().endswith("\n>")

        until(sleeps)
        prompts = self.screen().count("\n>")
        self.press("Enter")
        until(lambda: self.screen().count("\n>") > prompts and sleeps())

    def shows(self, words: str) -> None:
        """Wait until the words are on the screen."""
        until(lambda: words in self.screen(), tells=self.screen)

    def end(self) -> None:
        self.do("kill-server")


class Server:
    """A Triton that repeats the last message; its answer to "slowly" waits for ``go_on``."""

    grpc: FakeGrpcServer

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def go_on(self) -> None:
        """Let the slow answer end."""
        assert self._loop is not None, "no request has come"
        self._loop.call_soon_threadsafe(self._gate.set)

    def answer(self, request: object) -> list[Step]:
        self._loop = asyncio.get_running_loop()
        message = json.loads(inputs_of(request)["messages"][0][0])[-1]["content"]
        wait = [Until(self._gate)] if message == "slowly" else []
        counts = {"num_input_tokens": 3, "num_output_tokens": 7}
        ending = text(f"answer to {message!r}", finish_reason="end_id", **counts)
        return [text("begins; "), *wait, ending, Say(final=True)]

    def messages(self) -> list[str]:
        """The last message of each request."""
        conversations = [json.loads(inputs_of(r)["messages"][0][0]) for r in self.grpc.asked]
        return [conversation[-1]["content"] for conversation in conversations]


@pytest.fixture
def server() -> Iterator[Server]:
    double = Server()
    with in_a_thread(lambda: FakeGrpcServer(double.answer)) as double.grpc:
        yield double


@pytest.fixture
def tmux(server: Server, tmp_path: Path) -> Iterator[Tmux]:
    command = shlex.join([sys.executable, str(CHAT), "--url", server.grpc.url, "--plain"])
    terminal = Tmux(tmp_path / "tmux", f"exec {command}")
    try:
        terminal.shows("\n>")
        yield terminal
    finally:
        terminal.end()


def test_a_pasted_text_of_several_lines_is_one_message(server: Server, tmux: Tmux) -> None:
    """Its line ends do not send it; Enter does."""
    tmux.paste("def f():\n    return 1\n")
    tmux.type("explain")
    tmux.press("Enter")
    tmux.shows("answer to 'def f")
    assert server.messages() == ["def f():\n    return 1\nexplain"]


def test_keys_during_an_answer_do_not_reach_the_screen(server: Server, tmux: Tmux) -> None:
    """Enter would break the answer's lines; what was typed is at the next prompt."""
    tmux.type("slowly")
    tmux.press("Enter")
    tmux.shows("begins;")
    tmux.type("next")
    tmux.press("Enter")
    server.go_on()
    tmux.shows("answer to 'next'")
    lines = tmux.screen().splitlines()
    assert "begins; answer to 'slowly'" in lines
    assert server.messages() == ["slowly", "next"]


def test_a_text_pasted_during_an_answer_is_one_message(server: Server, tmux: Tmux) -> None:
    """It waits at the next prompt, whatever its length."""
    pasted = "def f():\n" + "    return 'wide 漢字'\n" * 120
    tmux.type("slowly")
    tmux.press("Enter")
    tmux.shows("begins;")
    tmux.paste(pasted)
    server.go_on()
    tmux.shows("return 'wide")
    tmux.type("explain")
    tmux.press("Enter")
    until(lambda: len(server.messages()) > 1 or None)
    assert server.messages() == ["slowly", pasted + "explain"]


@pytest.mark.parametrize("name", ["~nobody-of-this-name/chat.md", "none/chat.md"])
def test_a_file_that_cannot_be_written_ends_no_conversation(
    server: Server, tmux: Tmux, name: str
) -> None:
    tmux.type("first")
    tmux.press("Enter")
    tmux.shows("answer to 'first'")
    tmux.type(f"/save {name}")
    tmux.press("Enter")
    tmux.shows("cannot be written")
    tmux.type("second")
    tmux.press("Enter")
    tmux.shows("answer to 'second'")


def test_no_ctrl_c_ends_a_conversation(server: Server, tmux: Tmux) -> None:
    """However often and quickly it is pressed, at the prompt and during an answer."""
    tmux.type("first")
    tmux.press("Enter")
    tmux.shows("answer to 'first'")
    tmux.do("send-keys", *["C-c"] * 5)
    tmux.takes_keys()
    tmux.type("slowly")
    tmux.press("Enter")
    until(lambda: tmux.screen().count("begins;") == 2)
    for _ in range(7):  # one by one: the system joins those that come together
        tmux.press("C-c")
    tmux.shows("interrupted")
    tmux.takes_keys()
    tmux.type("second")
    tmux.press("Enter")
    tmux.shows("answer to 'second'")
    kept = [json.loads(inputs_of(r)["messages"][0][0]) for r in server.grpc.asked][-1]
    assert [turn["content"] for turn in kept] == [
        *("first", "begins; answer to 'first'", "slowly", "begins; ", "second"),
    ]
