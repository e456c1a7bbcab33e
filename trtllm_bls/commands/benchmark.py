"""How fast servers answer: a batch of requests at once, and requests one after the other.

Owns the asking. ``servers`` knows the APIs, ``benchmark_figures`` what is computed, and
``benchmark_report`` how it is shown.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trtllm_bls.client import Client, Tls
from trtllm_bls.commands.benchmark_figures import Outcome, problem_of
from trtllm_bls.commands.benchmark_report import Report, Run, check_outputs
from trtllm_bls.commands.reply import Reply
from trtllm_bls.commands.servers import Question, Server, server_at
from trtllm_bls.commands.terminal import Exit, Program, assignments, run
from trtllm_bls.errors import SettingsError, TrtllmBlsError
from trtllm_bls.settings import TlsConnection, options_of

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

_URL = "localhost:8001"
_PROMPTS = (
    "Once upon a time",
    "What is machine learning?",
    "Write a short letter to a friend about the sea.",
    "Explain how a bicycle stays upright.",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked; a turn are the numbers of questions that are asked at once."""

    questions: list[Question]
    turns: list[range]
    warmup: int
    timeout_s: float


@click.command(cls=Program)
@click.option("-u", "--url", "urls", multiple=True, help="Repeatable; localhost:8001 by default.")
@click.option("--model", "models", multiple=True, help="Repeatable; each is asked at each --url.")
@click.option(
    "--mode",
    type=click.Choice(["batch", "latency", "both"]),
    default="both",
    show_default=True,
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="A file of prompts; repeated or cut to --requests. Without one, a few of our own.",
)
@click.option(
    "-n",
    "--requests",
    type=click.IntRange(1),
    help="Requests of each run.  [default: 128 in a batch, 20 one by one]",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=1, show_default=True, help="Batches in turn."
)
@click.option("-o", "--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Every answer has --max-tokens tokens.")
@click.option("--chat", is_flag=True, help="Send prompts as a user's messages.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option(
    "--field", "fields", multiple=True, metavar="NAME=JSON", help="Any other field of requests."
)
@click.option(
    "--warmup", type=click.IntRange(0), default=1, show_default=True, help="Requests not counted."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds until a request counts as failed.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Of OpenAI APIs.")
@options_of(TlsConnection)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures.")
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write a page of them.")
@click.option("--png", "png_file", type=click.Path(path_type=Path), help="Needs matplotlib.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def main(**given: Any) -> None:
    """Measure how fast servers answer.

    batch: all requests at once; tokens/s and requests/s. latency: one request after the other; p50
    and p90 of whole answers and of first tokens. Each --url is HOST:PORT of Triton's gRPC port, or
    http://HOST:PORT/v1 of an OpenAI API. Several of them, or several --model, are compared in one
    run: they take turns, and who begins changes, so that what else the machine does falls on all
    alike.

    A prompts file has one prompt per line, or is JSON (a list, or lists by name) or JSON lines, of
    texts or of objects with "prompt", "text", "text_input" or "messages".

    \b
    Examples:
      PROGRAM
      PROGRAM --mode batch --requests 128 --max-tokens 64 --ignore-eos
      PROGRAM --mode latency --requests 50 --html latency.html
      PROGRAM --prompts prompts.jsonl --chat --max-tokens 128
      PROGRAM --url http://127.0.0.1:9000/v1 --url 127.0.0.1:8001 --json both.json
      PROGRAM --url http://a:8000/v1 --url http://b:8000/v1 --chat --field top_k=1
    """
    run(lambda: asyncio.run(_measure(given)))


async def _measure(given: dict[str, Any]) -> Exit:
    check_outputs(given["json_file"], given["html_file"], given["png_file"])
    modes = ["batch", "latency"] if given["mode"] == "both" else [given["mode"]]
    plans = {mode: _plan(given, mode) for mode in modes}
    console = Console(stderr=True)
    async with AsyncExitStack() as stack:
        places = [*itertools.product(given["urls"] or [_URL], given["models"] or [None])]
        servers = [await _opened(stack, *place, given) for place in places]
        names = _names([url for url, _ in places], servers)
        runs = []
        for mode, plan in plans.items():
            with _progress(console, given["quiet"]) as bar:
                task = bar.add_task(mode, total=len(servers) * sum(map(len, plan.turns)))
                await _warm_up(servers, plan)
                found = await _in_turns(servers, plan, lambda: bar.advance(task))  # noqa: B023
                runs.append(Run(mode, *found))
    report = Report(names=names, runs=tuple(runs), conditions=_conditions(given))
    report.show(Console())
    report.write(given["json_file"], given["html_file"], given["png_file"])
    return Exit.FAILED if report.failed else Exit.FINISHED


# --- what to ask ------------------------------------------------------------------------------


def _plan(given: dict[str, Any], mode: str) -> Plan:
    prompts = read_prompts(given["prompts"]) if given["prompts"] else list(_PROMPTS)
    fields = {"temperature": given["temperature"], "ignore_eos": given["ignore_eos"] or None}
    fields |= assignments("--field", given["fields"])
    questions = []
    batch = mode == "batch"
    count = given["requests"] or (128 if batch else 20)
    for prompt in itertools.islice(itertools.cycle(prompts), count):
        named: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            named = {"messages": tuple(prompt)}
        elif given["chat"]:
            named = {"messages": ({"role": "user", "content": prompt},)}
        questions.append(Question(**named, max_tokens=given["max_tokens"], fields=fields))
    turns = [range(count)] * given["rounds"] if batch else [range(n, n + 1) for n in range(count)]
    return Plan(
        questions=questions, turns=turns, warmup=given["warmup"], timeout_s=given["timeout"]
    )


def read_prompts(file: Path) -> list[str | list[dict[str, str]]]:
    """The prompts of a file, as its help describes them. Raises ``SettingsError``."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise SettingsError(f"--prompts {file}: cannot be read: {error}") from error
    found: Any
    try:
        found = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            found = lines  # plain text
    if isinstance(found, dict) and "messages" not in found:  # lists by name
        lists = [value for value in found.values() if isinstance(value, list)]
        found = [each for value in lists for each in value] or found
    prompts = [_prompt(file, each) for each in (found if isinstance(found, list) else [found])]
    if not prompts:
        raise SettingsError(f"--prompts {file}: has no prompt")
    return prompts


def _prompt(file: Path, entry: Any) -> str | list[dict[str, str]]:
    if isinstance(entry, dict):
        names = ("prompt", "text", "text_input", "messages")
        entry = next((entry[name] for name in names if name in entry), None)
    if isinstance(entry, list) and entry and all(isinstance(each, dict) for each in entry):
        return entry
    if not isinstance(entry, (str, int, float)) or entry == "":
        shown = json.dumps(entry)[:60]
        raise SettingsError(f"--prompts {file}: {shown} is no prompt; write a text or messages")
    return str(entry)


def _names(urls: Sequence[str], servers: Sequence[Server]) -> tuple[str, ...]:
    """Of the servers at ``urls``; equal ones get numbers."""
    found = [f"{server.model} at {url}" for url, server in zip(urls, servers, strict=True)]
    return tuple(
        f"{name} ({n})" if found.count(name) > 1 else name for n, name in enumerate(found, 1)
    )


def _conditions(given: dict[str, Any]) -> dict[str, Any]:
    shown = ["mode", "prompts", "requests", "rounds", "max_tokens", "ignore_eos", "chat"]
    shown += ["temperature", "fields", "warmup"]
    found = {name: given[name] for name in shown}
    return {**found, "prompts": str(given["prompts"] or "built in"), "at": time.strftime("%F %T%z")}


# --- the runs ---------------------------------------------------------------------------------


async def _opened(
    stack: AsyncExitStack, url: str, model: str | None, given: dict[str, Any]
) -> Server:
    tls = Tls.of_options(given)
    server = server_at(url, model, given["api_key"], partial(Client, url, tls=tls))
    stack.push_async_callback(server.close)
    await server.open()
    return server


def _progress(console: Console, quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, disable=quiet, transient=True)


async def _in_turns(
    servers: Sequence[Server], plan: Plan, done: Callable[[], object]
) -> tuple[list[list[Outcome]], list[float]]:
    """Each turn at each server, and only then the next: outcomes and seconds of each server."""
    found: list[list[Outcome]] = [[] for _ in servers]
    seconds = [0.0] * len(servers)
    for turn, places in enumerate(plan.turns):
        for target in _order(len(servers), turn):
            began = time.perf_counter()
            asked = (_ask(servers[target], (target, place), plan, done) for place in places)
            found[target] += await asyncio.gather(*asked)
            seconds[target] += time.perf_counter() - began
    return found, seconds


def _order(servers: int, turn: int) -> list[int]:
    """Who is asked in which order; each begins equally often."""
    return [(turn + n) % servers for n in range(servers)]


async def _warm_up(servers: Sequence[Server], plan: Plan) -> None:
    for target, server in enumerate(servers):
        for place in range(min(plan.warmup, len(plan.questions))):
            await _ask(server, (target, place), plan, lambda: None)


async def _ask(
    server: Server, numbers: tuple[int, int], plan: Plan, done: Callable[[], object]
) -> Outcome:
    """One request; ``numbers`` are those of its server and of its prompt."""
    target, place = numbers
    question, reply, problem = plan.questions[place], Reply(), None
    try:
        async with timeout(plan.timeout_s), aclosing(server.ask(question)) as events:
            async for event in events:
                reply.add(event)
        problem = problem_of(reply, question)
    except TrtllmBlsError as error:
        problem = str(error)
    except asyncio.TimeoutError:
        problem = f"no complete answer within {plan.timeout_s:g} s"
    whole_s = time.perf_counter() - reply.sent
    done()
    return Outcome(
        target=target,
        place=place,
        sent=reply.sent,
        ttft_s=reply.ttft_s,
        whole_s=whole_s,
        tokens=reply.completion_tokens,
        finish_reason=reply.finish_reason,
        problem=problem,
    )
