"""Three prompts through a real server, shown as their text arrives.

Owns which prompts and what the summary says; the client does the talking.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from trtllm_bls.client import Client
from trtllm_bls.errors import SettingsError
from trtllm_bls.launcher.find import CHECKOUT
from trtllm_bls.launcher.server import TritonServer
from trtllm_bls.launcher.terminal import Terminal
from trtllm_bls.settings import ServeSettings

PROMPTS_FILE = CHECKOUT / "assets" / "demo" / "prompts.json"
BUILT_IN_PROMPTS = ("Once upon a time",)


@dataclass(frozen=True)
class Answer:
    """One answer's figures; ``tokens`` is ``None`` where the server does not count."""

    text: str
    tokens: int | None
    first_text_s: float | None
    total_s: float


def prompts(file: Path = PROMPTS_FILE) -> tuple[str, ...]:
    """The checkout's demo prompts; one built-in prompt where there are none."""
    if not file.is_file():
        return BUILT_IN_PROMPTS
    try:
        return tuple(str(prompt) for prompt in json.loads(file.read_text(encoding="utf-8"))["demo"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file}: needs a list of prompts under 'demo'") from error


def demo(settings: ServeSettings, *, max_tokens: int, verbose: bool = False) -> int:
    """Run it; returns 0, or 1 if any answer was empty. Raises what server and client raise."""
    asked = prompts()
    progress = Terminal(Console(stderr=True), verbose=verbose)
    server = TritonServer(settings, progress)
    try:
        with progress.progress():
            server.start()
        answers = asyncio.run(ask(server.grpc_url, asked, max_tokens, Console()))
    finally:
        server.stop()
    return 0 if all(answer.text.strip() for answer in answers) else 1


async def ask(
    url: str, asked: Sequence[str], max_tokens: int, console: Console
) -> tuple[Answer, ...]:
    """Stream each prompt's answer to the console, then a line of figures for each."""
    async with Client(url) as client:
        answers = tuple([await _answer(client, prompt, max_tokens, console) for prompt in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        console.print(Text(_figures(prompt, answer), style="green" if answer.text else "red"))
    return answers


async def _answer(client: Client, prompt: str, max_tokens: int, console: Console) -> Answer:
    console.print(Text(f"\n{prompt}", style="bold"), end="")
    started = time.perf_counter()
    first: float | None = None
    tokens: int | None = None
    parts: list[str] = []
    async with client.stream(text_input=prompt, max_tokens=max_tokens) as stream:
        async for event in stream:
            tokens = event.num_output_tokens or tokens
            if event.text:
                first = first or event.received_at - started
                parts.append(event.text)
                console.out(event.text, end="", highlight=False)
    console.print("\n")
    return Answer("".join(parts), tokens, first, time.perf_counter() - started)


def _figures(prompt: str, answer: Answer) -> str:
    if not answer.text:
        return f"{prompt!r}: no text came back"
    counted = f"{answer.tokens} tokens" if answer.tokens else f"{len(answer.text)} characters"
    return (
        f"{prompt!r}: {counted} in {answer.total_s:.2f} s, first after {answer.first_text_s:.3f} s"
    )
