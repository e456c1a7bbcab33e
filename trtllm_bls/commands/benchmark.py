"""How fast servers answer: batches of requests at once, and requests one after the other.

Reads top to bottom: the options, what is asked, the asking, the figures, the report. ``servers``
knows the two APIs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from trtllm_bls.commands.reply import Reply
from trtllm_bls.commands.servers import Question, Server, server_at
from trtllm_bls.commands.terminal import Exit, assignments, program, run
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


@program()
@click.option(
    *("-u", "--url", "urls"),
    multiple=True,
    help="A server; repeatable.  [default: localhost:8001, Triton's gRPC]",
)
@click.option("--model", "models", multiple=True, help="Repeatable; each is asked at each --url.")
@click.option(
    "--mode",
    type=click.Choice(["batch", "latency", "both"]),
    default="both",
    show_default=True,
    help="All requests at once, or one after the other.",
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
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Key of OpenAI APIs.")
@options_of(TlsConnection)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
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
      trtllm-bls benchmark
      trtllm-bls benchmark --mode batch --requests 128 --max-tokens 64 --ignore-eos
      trtllm-bls benchmark --mode latency --requests 50
      trtllm-bls benchmark --prompts prompts.jsonl --chat --max-tokens 128
      trtllm-bls benchmark --url http://127.0.0.1:9000/v1 --url 127.0.0.1:8001 --json both.json
      trtllm-bls benchmark --url http://a:8000/v1 --url http://b:8000/v1 --chat --field top_k=1
    """
    run(lambda: asyncio.run(_measure(given)))


async def _measure(given: dict[str, Any]) -> Exit:
    json_file: Path | None = given["json_file"]
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise SettingsError(f"--json {json_file}: there is no such directory")
    modes = ["batch", "latency"] if given["mode"] == "both" else [given["mode"]]
    questions = {mode: _questions(given, mode) for mode in modes}
    async with AsyncExitStack() as stack:
        targets = [*itertools.product(given["urls"] or [_URL], given["models"] or [None])]
        at = [server_at(url, model, given) for url, model in targets]
        servers = [await stack.enter_async_context(server) for server in at]
        names = [f"{s.model} at {url}" for s, (url, _) in zip(servers, targets, strict=True)]
        names = [
            f"{name} ({n})" if names.count(name) > 1 else name for n, name in enumerate(names, 1)
        ]
        runs = [await _run(mode, names, servers, questions[mode], given) for mode in modes]
    for measured in runs:
        _show(measured)
    if json_file is not None:
        options = ("mode", "requests", "rounds", "max_tokens", "ignore_eos", "chat", "temperature")
        conditions = {name: given[name] for name in (*options, "fields", "warmup")}
        conditions |= {"prompts": str(given["prompts"] or "built in")}
        conditions |= {"at": time.strftime("%F %T%z")}
        text = json.dumps({"conditions": conditions, "runs": runs}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
    failed = any(each["failed"] for measured in runs for each in measured["servers"])
    return Exit.FAILED if failed else Exit.FINISHED


# --- what to ask ------------------------------------------------------------------------------


def _questions(given: dict[str, Any], mode: str) -> list[Question]:
    prompts = read_prompts(given["prompts"]) if given["prompts"] else list(_PROMPTS)
    fields = {"temperature": given["temperature"], "ignore_eos": given["ignore_eos"] or None}
    fields |= assignments("--field", given["fields"])
    questions = []
    count = given["requests"] or (128 if mode == "batch" else 20)
    for prompt in itertools.islice(itertools.cycle(prompts), count):
        named: dict[str, Any] = {"prompt": prompt}
        if not isinstance(prompt, str):
            named = {"messages": tuple(prompt)}
        elif given["chat"]:
            named = {"messages": ({"role": "user", "content": prompt},)}
        questions.append(Question(**named, max_tokens=given["max_tokens"], fields=fields))
    return questions


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


async def _run(
    mode: str,
    names: Sequence[str],
    servers: Sequence[Server],
    questions: Sequence[Question],
    given: dict[str, Any],
) -> dict[str, Any]:
    """One mode's figures, as --json has them. Each turn is at each server before the next turn."""
    each_index = range(len(questions))
    turns: list[Sequence[int]] = [each_index] * given["rounds"]
    if mode == "latency":
        turns = [[index] for index in each_index]

    async def ask(target: int, index: int) -> Measurement:
        return await _ask(servers[target], target, index, questions[index], given["timeout"])

    for target in range(len(servers)):
        for index in each_index[: given["warmup"]]:
            await ask(target, index)
    found: list[list[Measurement]] = [[] for _ in servers]
    seconds = [0.0] * len(servers)
    console = Console(stderr=True)
    with Progress(console=console, disable=given["quiet"], transient=True) as bar:
        progress = bar.add_task(mode, total=len(servers) * sum(map(len, turns)))
        for turn, indices in enumerate(turns):
            for n in range(len(servers)):
                target = (turn + n) % len(servers)  # a different server begins each turn
                began = time.perf_counter()
                asked = [asyncio.create_task(ask(target, index)) for index in indices]
                for request in asked:
                    request.add_done_callback(lambda _: bar.advance(progress))
                found[target] += await asyncio.gather(*asked)
                seconds[target] += time.perf_counter() - began
    return {
        "mode": mode,
        "servers": [
            {"name": name, **figures(outcomes, took), "outcomes": [asdict(o) for o in outcomes]}
            for name, outcomes, took in zip(names, found, seconds, strict=True)
        ],
        "compared_with_the_first": [compare(found[0], other) for other in found[1:]],
    }


async def _ask(
    server: Server, target: int, index: int, question: Question, timeout_s: float
) -> Measurement:
    reply = Reply(question.max_tokens)
    try:
        async with timeout(timeout_s), aclosing(server.ask(question)) as events:
            async for event in events:
                reply.add(event)
        problem = problem_of(reply, question)
    except TrtllmBlsError as error:
        problem = str(error)
    except asyncio.TimeoutError:
        problem = f"no complete answer within {timeout_s:g} s"
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


def figures(measurements: Sequence[Measurement], seconds: float) -> dict[str, Any]:
    """Of one server, which worked on them for ``seconds``; ``None`` where nothing was measured.

    ``tokens_per_s`` and ``requests_per_s`` are those of the server while it had requests to answer;
    ``stream_tokens_per_s`` is the median of single answers, from sending to the end.
    """
    good = [each for each in measurements if each.problem is None]
    counts = [each.tokens for each in good if each.tokens is not None]
    tokens = sum(counts) if good and len(counts) == len(good) else None
    return {
        "requests": len(measurements),
        "failed": len(measurements) - len(good),
        "problems": Counter(m.problem for m in measurements if m.problem is not None),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens and tokens / seconds,
        "requests_per_s": len(good) / seconds if good else None,
        "stream_tokens_per_s": _median([m.tokens / m.whole_s for m in good if m.tokens]),
        "ttft_ms": _percentiles([m.ttft_s * 1000 for m in good if m.ttft_s is not None]),
        "whole_ms": _percentiles([m.whole_s * 1000 for m in good]),
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return {"mean": statistics.fmean(values), "p50": p50, "p90": p90, "p99": p99}


def compare(first: Sequence[Measurement], other: Sequence[Measurement]) -> dict[str, Any]:
    """A server beside the first one, both in the order of asking: over the requests that both
    answered, medians of its time divided by the first one's."""
    pairs = [
        (a, b) for a, b in zip(first, other, strict=True) if a.problem is None and b.problem is None
    ]
    return {
        "pairs": len(pairs),
        "ttft_ratio": _median([b.ttft_s / a.ttft_s for a, b in pairs if a.ttft_s and b.ttft_s]),
        "whole_ratio": _median([b.whole_s / a.whole_s for a, b in pairs]),
    }


def _show(measured: dict[str, Any]) -> None:
    """A table with a column per server, then the comparisons and the problems, a line each."""
    first, *others = servers = measured["servers"]
    columns = [["requests", "failed", "tokens/s", "requests/s", "tokens/s of one answer"]]
    columns[0] += [f"{w} p{p}" for w in ("first token", "whole answer") for p in (50, 90, 99)]
    table = Table("server", title=f"{measured['mode']}; times in ms", title_justify="left")
    for server in servers:
        table.add_column(server["name"], justify="right", overflow="fold")
        numbers = [server[f"{what}_per_s"] for what in ("tokens", "requests", "stream_tokens")]
        for times in (server["ttft_ms"], server["whole_ms"]):
            numbers += [times and times[part] for part in ("p50", "p90", "p99")]
        cells = ["-" if n is None else f"{n:,.{0 if n >= 1000 else 1}f}" for n in numbers]
        columns.append([str(server["requests"]), str(server["failed"]), *cells])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for server, compared in zip(others, measured["compared_with_the_first"], strict=True):
        rates = server["tokens_per_s"], first["tokens_per_s"]
        ratios = {
            "tokens/s": rates[0] / rates[1] if all(rates) else None,
            "time to the first token": compared["ttft_ratio"],
            "time of whole answers": compared["whole_ratio"],
        }
        parts = [f"{ratio:.2f}x the {what}" for what, ratio in ratios.items() if ratio]
        told = ", ".join(parts) or "nothing to compare"
        line = f"{server['name']}, beside the first, {compared['pairs']} pairs: {told}"
        console.print(Text(line))
    for server in servers:
        for problem, count in server["problems"].items():
            console.print(Text(f"{server['name']}: {count} x {problem}"))
