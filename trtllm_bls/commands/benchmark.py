"""How fast servers answer: batches of requests at once, and requests one after the other.

Reads top to bottom: the options, what is asked, the asking, the figures, the report. ``servers``
knows the two APIs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trtllm_bls.client import Client, Tls
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
# None: a server that gives no reason.
_FINISH_REASONS = {"stop", "length", "end_id", "tool_calls", None}


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
    help="A file of prompts, repeated or cut to --requests; a few built-in ones by default.",
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
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    help="Write all figures and every request to this file.",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def main(**given: Any) -> None:
    """Measure how fast servers answer.

    batch: all requests at once; tokens/s and requests/s. latency: one request after the other; p50,
    p90 and p99 of the time to the first token and of whole answers. Each --url is HOST:PORT of
    Triton's gRPC port, or http://HOST:PORT/v1 of an OpenAI API. Several of them, or several
    --model, are compared in one run: the servers take turns, and a different one begins each turn,
    so that other load on the machine affects all of them alike.

    A prompts file has one prompt per line, or is JSON (a list, or lists by name) or JSON lines, of
    texts or of objects with "prompt", "text", "text_input" or "messages".

    \b
    Examples:
      PROGRAM
      PROGRAM --mode batch --requests 128 --max-tokens 64 --ignore-eos
      PROGRAM --mode latency --requests 50
      PROGRAM --prompts prompts.jsonl --chat --max-tokens 128
      PROGRAM --url http://127.0.0.1:9000/v1 --url 127.0.0.1:8001 --json both.json
      PROGRAM --url http://a:8000/v1 --url http://b:8000/v1 --chat --field top_k=1
    """
    run(lambda: asyncio.run(_measure(given)))


async def _measure(given: dict[str, Any]) -> Exit:
    json_file: Path | None = given["json_file"]
    if json_file is not None:  # refused now rather than after the measurement
        if not json_file.absolute().parent.is_dir():
            raise SettingsError(f"--json {json_file}: there is no such directory")
        if json_file.is_dir():
            raise SettingsError(f"--json {json_file}: is a directory")
    modes = ["batch", "latency"] if given["mode"] == "both" else [given["mode"]]
    plans = {mode: _plan(given, mode) for mode in modes}
    async with AsyncExitStack() as stack:
        targets = [*itertools.product(given["urls"] or [_URL], given["models"] or [None])]
        servers = [await _opened(stack, *target, given) for target in targets]
        names = [f"{s.model} at {url}" for s, (url, _) in zip(servers, targets, strict=True)]
        runs = [await _run(servers, plan, mode, given["quiet"]) for mode, plan in plans.items()]
    names = [f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, 1)]
    for measured in runs:
        _show(names, measured)
    if json_file is not None:
        text = json.dumps(_as_json(names, runs, given), indent=1)
        try:
            json_file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"--json {json_file}: {error.strerror}") from error
    failed = any(each.failed for measured in runs for each in measured.figures)
    return Exit.FAILED if failed else Exit.FINISHED


# --- what to ask ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked; a turn are the indices of the questions that are asked at once."""

    questions: list[Question]
    turns: list[range]
    warmup: int
    timeout_s: float


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
        quoted = json.dumps(entry)[:60]
        raise SettingsError(f"--prompts {file}: {quoted} is no prompt; write a text or messages")
    return str(entry)


# --- asking -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One request. Times in seconds; ``None`` where nothing came. ``problem``: why the request
    counts as failed; no figure has its times."""

    target: int  # index of the server
    index: int  # index of the question
    sent: float  # time.perf_counter()
    ttft_s: float | None
    whole_s: float  # from sending to the end of the answer
    tokens: int | None
    finish_reason: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """One mode: each server's measurements in the order of asking, and its figures."""

    mode: str
    measurements: list[list[Measurement]]
    figures: list[Figures]

    @property
    def comparisons(self) -> list[Comparison]:
        """Of each server but the first."""
        return [compare(self.measurements[0], other) for other in self.measurements[1:]]


async def _opened(
    stack: AsyncExitStack, url: str, model: str | None, given: dict[str, Any]
) -> Server:
    tls = Tls.of_options(given)
    server = server_at(url, model, given["api_key"], partial(Client, url, tls=tls))
    stack.push_async_callback(server.close)
    await server.open()
    return server


async def _run(servers: Sequence[Server], plan: Plan, mode: str, quiet: bool) -> Run:
    """Each turn at each server, and only then the next turn."""
    for target, server in enumerate(servers):
        for index in range(min(plan.warmup, len(plan.questions))):
            await _ask(server, target, index, plan)
    found: list[list[Measurement]] = [[] for _ in servers]
    seconds = [0.0] * len(servers)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=quiet, transient=True
    ) as bar:
        progress = bar.add_task(mode, total=len(servers) * sum(map(len, plan.turns)))
        for turn, indices in enumerate(plan.turns):
            for n in range(len(servers)):
                target = (turn + n) % len(servers)  # a different server begins each turn
                began = time.perf_counter()
                asked = [
                    asyncio.create_task(_ask(servers[target], target, index, plan))
                    for index in indices
                ]
                for request in asked:
                    request.add_done_callback(lambda _: bar.advance(progress))
                found[target] += await asyncio.gather(*asked)
                seconds[target] += time.perf_counter() - began
    return Run(mode, found, [figures(*pair) for pair in zip(found, seconds, strict=True)])


async def _ask(server: Server, target: int, index: int, plan: Plan) -> Measurement:
    question, reply = plan.questions[index], Reply()
    try:
        async with timeout(plan.timeout_s), aclosing(server.ask(question)) as events:
            async for event in events:
                reply.add(event)
        problem = problem_of(reply, question)
    except TrtllmBlsError as error:
        problem = str(error)
    except asyncio.TimeoutError:
        problem = f"no complete answer within {plan.timeout_s:g} s"
    return Measurement(
        target=target,
        index=index,
        sent=reply.sent,
        ttft_s=reply.ttft_s,
        whole_s=time.perf_counter() - reply.sent,
        tokens=reply.completion_tokens,
        finish_reason=reply.finish_reason,
        problem=problem,
    )


def problem_of(reply: Reply, question: Question) -> str | None:
    """What is wrong with an answer that came to its end; ``None`` if all is well."""
    reason, tokens, max_tokens = reply.finish_reason, reply.completion_tokens, question.max_tokens
    if reason not in _FINISH_REASONS:
        return f"ended by {reason!r}"
    if not reply.text:
        return "no text came"
    if tokens is not None and tokens > max_tokens:
        return f"{tokens} tokens, more than the {max_tokens} asked for"
    if question.fields.get("ignore_eos") and tokens is not None and tokens < max_tokens:
        return f"{tokens} tokens where {max_tokens} were asked for with --ignore-eos"
    return None


# --- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one server in one run; times in milliseconds, ``None`` where nothing was measured.

    ``tokens_per_s`` and ``requests_per_s`` are those of the server while it had requests to answer;
    ``stream_tokens_per_s`` is the median of single answers, from sending to the end.
    """

    requests: int
    failed: int
    problems: dict[str, int]
    seconds: float
    tokens: int | None
    tokens_per_s: float | None
    requests_per_s: float | None
    stream_tokens_per_s: float | None
    ttft_ms: dict[str, float] | None
    whole_ms: dict[str, float] | None


def figures(measurements: Sequence[Measurement], seconds: float) -> Figures:
    """``seconds``: how long the server worked on them."""
    good = [each for each in measurements if each.problem is None]
    counts = [each.tokens for each in good if each.tokens is not None]
    counted = len(counts) == len(good) and good
    rates = [m.tokens / m.whole_s for m in good if m.tokens is not None and m.whole_s > 0]
    return Figures(
        requests=len(measurements),
        failed=len(measurements) - len(good),
        problems=dict(Counter(m.problem for m in measurements if m.problem is not None)),
        seconds=seconds,
        tokens=sum(counts) if counted else None,
        tokens_per_s=sum(counts) / seconds if counted and seconds > 0 else None,
        requests_per_s=len(good) / seconds if good and seconds > 0 else None,
        stream_tokens_per_s=float(np.median(rates)) if rates else None,
        ttft_ms=_percentiles([m.ttft_s * 1000 for m in good if m.ttft_s is not None]),
        whole_ms=_percentiles([m.whole_s * 1000 for m in good]),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    mean = float(np.mean(values))
    return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99)}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A server beside the first one, over the requests that both answered: medians of its time
    divided by the first one's."""

    pairs: int
    ttft_ratio: float | None
    whole_ratio: float | None


def compare(first: Sequence[Measurement], other: Sequence[Measurement]) -> Comparison:
    """Both in the order of asking."""
    pairs = [
        (a, b) for a, b in zip(first, other, strict=True) if a.problem is None and b.problem is None
    ]
    ttft = [b.ttft_s / a.ttft_s for a, b in pairs if a.ttft_s and b.ttft_s]
    whole = [b.whole_s / a.whole_s for a, b in pairs if a.whole_s]
    return Comparison(
        pairs=len(pairs),
        ttft_ratio=float(np.median(ttft)) if ttft else None,
        whole_ratio=float(np.median(whole)) if whole else None,
    )


# --- the report -------------------------------------------------------------------------------


def _show(names: Sequence[str], measured: Run) -> None:
    """A table with a column per server, then the comparisons and the problems, a line each."""
    table = Table("server", title=f"{measured.mode}; times in ms", title_justify="left")
    columns = [["requests", "failed", "tokens/s", "requests/s", "tokens/s of one answer"]]
    columns[0] += [f"{w} p{p}" for w in ("first token", "whole answer") for p in (50, 90, 99)]
    for name, found in zip(names, measured.figures, strict=True):
        table.add_column(name, justify="right", overflow="fold")
        numbers = [found.tokens_per_s, found.requests_per_s, found.stream_tokens_per_s]
        for times in (found.ttft_ms, found.whole_ms):
            numbers += [times[part] if times else None for part in ("p50", "p90", "p99")]
        cells = ["-" if n is None else f"{n:,.{0 if n >= 1000 else 1}f}" for n in numbers]
        columns.append([str(found.requests), str(found.failed), *cells])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console = Console()
    console.print(table)
    first = measured.figures[0]
    others = zip(names[1:], measured.figures[1:], measured.comparisons, strict=True)
    for name, found, compared in others:
        ratios = {
            "tokens/s": found.tokens_per_s
            and first.tokens_per_s
            and found.tokens_per_s / first.tokens_per_s,
            "time to the first token": compared.ttft_ratio,
            "time of whole answers": compared.whole_ratio,
        }
        parts = [f"{ratio:.2f}x the {what}" for what, ratio in ratios.items() if ratio]
        told = ", ".join(parts) or "nothing to compare"
        console.print(Text(f"{name}, beside the first, {compared.pairs} pairs: {told}"))
    for name, found in zip(names, measured.figures, strict=True):
        for problem, count in found.problems.items():
            console.print(Text(f"{name}: {count} x {problem}"))


def _as_json(names: Sequence[str], runs: Sequence[Run], given: dict[str, Any]) -> dict[str, Any]:
    options = ["mode", "requests", "rounds", "max_tokens", "ignore_eos", "chat", "temperature"]
    conditions = {name: given[name] for name in (*options, "fields", "warmup")}
    conditions |= {"prompts": str(given["prompts"] or "built in"), "at": time.strftime("%F %T%z")}
    return {
        "conditions": conditions,
        "runs": [
            {
                "mode": measured.mode,
                "servers": [
                    {"name": name, **asdict(found), "outcomes": [asdict(each) for each in requests]}
                    for name, found, requests in zip(
                        names, measured.figures, measured.measurements, strict=True
                    )
                ],
                "compared_with_the_first": [asdict(each) for each in measured.comparisons],
            }
            for measured in runs
        ],
    }
