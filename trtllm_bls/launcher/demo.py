"""Three prompts through a real server, shown as their text arrives.

Owns which prompts and what the summary shows.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from trtllm_bls.checkpoint_dir import DEMO
from trtllm_bls.client import Client
from trtllm_bls.commands.shared import Reply
from trtllm_bls.launcher.http_process import chat_curl
from trtllm_bls.launcher.serve import VERBOSE, Terminal
from trtllm_bls.launcher.server import TritonServer
from trtllm_bls.settings import ServeSettings, options_of

PROMPTS = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["demo"]


_WHAT_IS_SERVED = (  # the settings of ``serve`` that ``demo`` has too
    *("model", "engine", "draft_model", "model_repository", "server", "threads", "overrides"),
)


@click.command()
@options_of(ServeSettings, *_WHAT_IS_SERVED)
@VERBOSE
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=320,
    show_default=True,
    help="Longest answer, in tokens.",
)
def command(verbose: bool, max_tokens: int, **options: Any) -> None:
    """Start a server on free ports, show answers as they stream, stop it.

    \b
    Examples:
      trtllm-bls demo
      trtllm-bls demo --model ./llama --max-tokens 200
    """
    settings = ServeSettings(**options, http_port=0, grpc_port=0, metrics_port=0, openai_port=0)
    progress = Terminal(Console(stderr=True), verbose=verbose)
    server = TritonServer(settings, progress)
    try:
        with progress.progress(), progress.lines_of_failure():
            server.start()
        progress.problems_only = True  # no line of the log between a prompt and its answer
        answers = asyncio.run(ask(server.grpc_url, PROMPTS, max_tokens, Console()))
    finally:
        server.stop()
    url = f"http://{settings.host}:{ServeSettings.openai_port}"
    runs = "while `make serve` or `trtllm-bls serve` runs"
    says = f"A page to chat is at {url}/ {runs}, OpenAI's API at {url}/v1:"
    Console().print(Text(f"\n{says}\n{chat_curl(url, settings)}"), soft_wrap=True)
    sys.exit(0 if all(answer.text.strip() for answer in answers) else 1)


async def ask(
    url: str, asked: Sequence[str], max_tokens: int, console: Console
) -> tuple[Reply, ...]:
    """Stream each prompt's answer to the console, then a line of figures for each."""
    answers = []
    async with Client(url) as client:
        for prompt in asked:
            console.print(Text(f"\n{prompt}", style="bold"), soft_wrap=True)  # log lines may follow
            answers.append(reply := Reply(max_tokens))
            async with client.stream(
                text_input=prompt, max_tokens=max_tokens, return_num_output_tokens=True
            ) as stream:
                async for event in stream:
                    reply.add(event)
                    console.out(event.text, end="", highlight=False)
            console.print("\n")
    for prompt, answer in zip(asked, answers, strict=True):
        found, told = answer.figures(), "no text came back"
        if answer.arrivals:
            told = (
                f"{found['num_output_tokens'] or '?'} tokens in {found['duration_ms'] / 1000:.2f} "
                f"s, the first after {found['ttft_ms']:.0f} ms; ended: {found['ended']}"
            )
        console.print(Text(f"{prompt!r}: {told}", style="green" if answer.text else "red"))
    return tuple(answers)
