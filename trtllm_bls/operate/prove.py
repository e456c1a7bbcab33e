"""``trtllm-bls prove``: a report on a deployment, for an issue or for oneself.

It asks a server a sceptic's questions: do all APIs give one text, and transformers' tokenizer the
same; does the engine stop when a caller leaves; are drafts lossless; how much does load cost,
beside another server too. No prompt, key, path or text of an error is in the report, only these
verdicts.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from trtllm_bls.bundled import DEMO
from trtllm_bls.client.client import BLS, ENGINE, Client
from trtllm_bls.engines.conformance import continued
from trtllm_bls.engines.conformance import examine as ask_engine
from trtllm_bls.engines.own_port import listening_processes
from trtllm_bls.engines.triton_model import GrpcEngine
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate.doctor import diagnose
from trtllm_bls.operate.findings import Subject, installed
from trtllm_bls.operate.supervisor import GRACE_MARGIN, Child
from trtllm_bls.operate.version import version_text
from trtllm_bls.orchestrator.status import ENGINE_REQUESTS, REQUESTS_LABEL
from trtllm_bls.settings.command_options import GrpcAddress, ServeSettings
from trtllm_bls.settings.model_config import read_config, values_of
from trtllm_bls.settings.model_names import ENSEMBLE_NAME
from trtllm_bls.settings.parent import end_with_parent
from trtllm_bls.text.tokenizer import load_tokenizer

_PROOF_PROMPTS = (
    "The capital of France is",
    "Count: one, two, three,",
    "def fibonacci(n):\n",
    "Une souris verte, qui courait dans l'herbe,",
    "नमस्ते, आप कैसे",
    "人工智能的历史",
    "😀 😃 😄",
    '{"name": "Ada", "born":',
)
_PROOF_TOKENS = 48
_LONG_PROMPT_WORDS = 1900  # tokens; fewer end before the metric of a fast engine shows the request
_READY_SECONDS = 600.0
_FREED_SECONDS = 30.0
_LAST_LINE_SECONDS = 5.0
_PACKAGES = ("tensorrt-llm", "torch", "transformers", "tokenizers", "tritonclient", "numpy")
_RUNNING = re.compile(
    rf"{ENGINE_REQUESTS}{{[^{{}}]{{0,200}}{REQUESTS_LABEL}="
    r'"(?:scheduled|waiting)"[^{}]{0,200}} (\d+)'
)
_REPORT_PATH = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A running server: its APIs, its tokenizer, and its processes where it runs here."""

    grpc: str
    http: str
    openai: str
    metrics: str
    tokenizer: Path
    engine_model: str
    process: psutil.Process | None


@dataclass
class Report:
    """Sections of rows (check, result), the figures under load, and facts about the machine."""

    machine: dict[str, str]
    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    load: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        rows = itertools.chain.from_iterable(self.sections.values())
        return any("FAILED" in result for _, result in rows)


# The sections of a report, in this order.
SECTIONS = ("doctor", "conformance", "text", "cancellation and stop", "speculation", "load")


@click.command()
@click.option("--out", type=_REPORT_PATH, required=True, help="Directory of the report.")
@click.option("--model-repository", type=_REPORT_PATH, help="Serve this repository for the report.")
@click.option("--model", type=_REPORT_PATH, help="Serve this checkpoint (default: the demo's).")
@click.option("--draft-model", type=_REPORT_PATH, help="With drafts of this one.")
@click.option("--engine", metavar="trtllm://HOST:PORT", help="Serve an engine that runs elsewhere.")
@click.option(
    "--url",
    type=GrpcAddress(),
    metavar="HOST:PORT",
    help="Or the gRPC port of a server that runs already.",
)
@click.option("--http-url", help="Its port 8000.  [default: on the same host]")
@click.option("--openai-url", help="Its OpenAI API.  [default: port 9000 of the same host]")
@click.option("--metrics-url", help="Its metrics.  [default: port 8002 of the same host]")
@click.option(
    "--tokenizer-dir", type=_REPORT_PATH, help="Its tokenizer, where no other option tells."
)
@click.option("--beside", help="Another server's OpenAI API, to load in turns with this one.")
@click.option(
    "--only", multiple=True, type=click.Choice(SECTIONS), help="Only this section; repeatable."
)
@click.option("--seconds", default=20.0, show_default=True, help="Of load, for each row.")
@click.option("--minutes", default=15.0, show_default=True, help="After which nothing begins.")
def command(out: Path, **options: Any) -> None:
    """Examine a deployment and write a report: report.md, report.json and plots.

    OPENAI_API_KEY has the key of the APIs, where one is needed; the server beside gets it, too.
    Exit code 1: a check failed.

    \b
    Examples:
      trtllm-bls prove --out report
      trtllm-bls prove --out report --model-repository /repository \\
        --beside http://127.0.0.1:8080
      trtllm-bls prove --out report --url 127.0.0.1:8001 \\
        --tokenizer-dir /models/llama
      trtllm-bls prove --out report --only conformance \\
        --engine trtllm://127.0.0.1:50051
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out {out}: {error.strerror}; name a directory") from error
    # SIGTERM ends the server, too, as an exception does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with _target(options) as target:
        report = asyncio.run(_prove(target, options))
    (out / "load.svg").write_text(plot(report.load), encoding="utf-8")
    (out / "report.json").write_text(json.dumps(vars(report), indent=1), encoding="utf-8")
    (out / "report.md").write_text(page(report), encoding="utf-8")
    verdict = "all checks passed"
    if report.failed:
        verdict = "a check FAILED"
    click.echo(f"{out / 'report.md'}: {verdict}")
    sys.exit(report.failed)


async def _prove(target: Target, options: dict[str, Any]) -> Report:
    deadline = time.monotonic() + options["minutes"] * 60
    report = Report(machine(target))
    steps: list[Callable[[], Awaitable[list[tuple[str, str]]]]] = [
        partial(asyncio.to_thread, _doctor, options["model_repository"]),
        partial(_conformance, target),
        partial(_text, target),
        partial(_ends, target),
        partial(_speculation, target),
        partial(_load, target, options["beside"], options["seconds"], report.load),
    ]
    examinations = dict(zip(SECTIONS, steps, strict=True))
    if options["only"]:
        examinations = {name: examinations[name] for name in SECTIONS if name in options["only"]}
    for number, (name, step) in enumerate(examinations.items(), 1):
        click.echo(f"[{number}/{len(examinations)}] {name}", err=True)
        try:
            remaining = max(0.0, deadline - time.monotonic())
            report.sections[name] = await asyncio.wait_for(step(), remaining)
        except asyncio.TimeoutError:
            report.sections[name] = [(name, "not finished: out of time")]
        except Exception as error:  # its text may have paths
            report.sections[name] = [(name, f"FAILED: {type(error).__name__}")]
            click.echo(f"{name}: {error}", err=True)
    return report


# --- the server --------------------------------------------------------------------------------


@contextmanager
def _target(options: dict[str, Any]) -> Iterator[Target]:
    """Yield the server that runs, or one that is served for as long as the block runs."""
    repository = options["model_repository"]
    parameters: dict[str, str] = {}
    with suppress(SettingsError, TypeError):
        parameters = values_of(read_config(repository / BLS.name / "config.pbtxt"))
    tokenizer = options["tokenizer_dir"] or options["model"]
    if tokenizer is None and parameters.get("tokenizer_dir"):
        tokenizer = repository / parameters["tokenizer_dir"]
    engine = parameters.get("tensorrt_llm_model_name") or ENGINE.name
    common: dict[str, Any] = {"tokenizer": tokenizer or DEMO / "target", "engine_model": engine}
    if options["url"]:
        if tokenizer is None:
            raise SettingsError("--tokenizer-dir: name the tokenizer of the server at --url")
        host = options["url"].rpartition(":")[0]
        default_ports = {"http": 8000, "openai": 9000, "metrics": 8002}
        urls: dict[str, Any] = {}
        for name, port in default_ports.items():
            urls[name] = options[f"{name}_url"] or f"http://{host}:{port}"
        process = _process_at(options["url"])
        yield Target(grpc=options["url"], process=process, **common, **urls)
        return
    ports = _free_ports("http", "grpc", "metrics", "health", "openai")
    words = [sys.executable, "-m", "trtllm_bls.cli", f"--exit-with-parent={os.getpid()}", "serve"]
    words += ["--on-failure", "exit"]
    for name, port in ports.items():
        words += [f"--{name}-port", str(port)]
    for name in ("model_repository", "model", "draft_model", "engine"):
        if options[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    lines: deque[str] = deque(["no line of it"], maxlen=1)
    health = f"http://127.0.0.1:{ports['health']}/health/ready"
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    serve = Child("serve", words, os.environ, lines.append, **streams)
    try:
        try:
            serve.wait_until(partial(_answers, health), _READY_SECONDS)
        except SetupError as error:
            serve.read_to_end(_LAST_LINE_SECONDS)
            raise SetupError(f"{error}: {lines[-1]}") from None
        yield Target(
            grpc=f"127.0.0.1:{ports['grpc']}",
            http=f"http://127.0.0.1:{ports['http']}",
            openai=f"http://127.0.0.1:{ports['openai']}",
            metrics=f"http://127.0.0.1:{ports['metrics']}",
            process=psutil.Process(serve.pid),
            **common,
        )
    finally:
        serve.end(ServeSettings.exit_timeout + 2 * GRACE_MARGIN)


def _answers(url: str) -> bool:
    """Return True if a GET of ``url`` is answered with 200."""
    with suppress(httpx.HTTPError):
        return httpx.get(url, trust_env=False).status_code == HTTPStatus.OK
    return False


def _free_ports(*names: str) -> dict[str, int]:
    ports = {}
    with ExitStack() as sockets:  # all are open at once, so that no port is chosen twice
        for name in names:
            listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports[name] = listener.getsockname()[1]
    return ports


def machine(target: Target) -> dict[str, str]:
    """Return the facts on which figures depend, without a name of the machine or a path."""
    facts = {"trtllm-bls": version_text(), "python": platform.python_version()}
    for package in _PACKAGES:
        if version := installed(package):
            facts[package] = version
    with suppress(OSError, httpx.HTTPError, ValueError, KeyError):
        facts["triton"] = httpx.get(f"{target.http}/v2", trust_env=False).json()["version"]
    facts["processor"] = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    with suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        facts["processor"] += ", " + re.findall(r"model name\s*: (.*)", text)[0]
    facts["memory"] = f"{psutil.virtual_memory().total >> 30} GiB"
    with suppress(OSError, subprocess.SubprocessError):
        query = "--query-gpu=name,driver_version,memory.total"
        words = ["nvidia-smi", query, "--format=csv,noheader"]
        table = subprocess.check_output(words, stderr=subprocess.PIPE, text=True, timeout=20)
        facts["gpu"] = "; ".join(table.strip().splitlines())
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        with suppress(OSError):
            digest.update((target.tokenizer / name).read_bytes())
    facts["model"] = f"sha256 of its configuration and tokenizer: {digest.hexdigest()[:16]}"
    return facts


# --- the checks --------------------------------------------------------------------------------


def _doctor(repository: Path | None) -> list[tuple[str, str]]:
    """Return each check's worst finding, without its words, which may have paths."""
    worst: dict[str, str] = {}
    for name, finding in diagnose(Subject(repository=repository, is_judged=False)):
        if finding.level != "ok" or name not in worst:
            worst[name] = {"error": "FAILED"}.get(finding.level, finding.level)
    return list(worst.items())


async def _conformance(target: Target) -> list[tuple[str, str]]:
    tokenizer = load_tokenizer(target.tokenizer)
    ids = tuple(tokenizer.encode("The capital of France is Paris. The capital of Japan is", True))
    engine = GrpcEngine(target.grpc, target.engine_model, tokenizer.model_vocab_size)
    if not await _has_model(target, target.engine_model):
        return [(target.engine_model, "not a model of this server")]
    try:
        checks = ask_engine(engine, ids, tokenizer.decode, tokenizer.eos_id or 0)
        return [(name, result.partition(": ")[0]) async for name, result in checks]
    finally:
        await engine.close()


async def _has_model(target: Target, name: str) -> bool:
    async with Client(target.grpc) as client:
        return await client.model_ready(name, 10.0)


def _http() -> httpx.AsyncClient:
    headers = {}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(headers=headers, timeout=120, limits=limits, trust_env=False)


async def _generate(http: httpx.AsyncClient, url: str, prompt: str) -> str:
    body = {"text_input": prompt, "max_tokens": _PROOF_TOKENS}
    response = await http.post(f"{url}/generate", json=body)
    return str(response.raise_for_status().json()["text_output"])


async def _generate_stream(http: httpx.AsyncClient, url: str, prompt: str) -> str:
    body = {"text_input": prompt, "max_tokens": _PROOF_TOKENS, "stream": True}
    text = ""
    async with http.stream("POST", f"{url}/generate_stream", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                text += json.loads(line[6:])["text_output"]
    return text


@dataclass
class TimedAnswer:
    """A streamed completion: its text, the times ``at`` which parts came, its number of tokens."""

    text: str = ""
    at: list[float] = field(default_factory=list)
    tokens: int = 0


async def _complete(http: httpx.AsyncClient, url: str, model: str, prompt: str) -> TimedAnswer:
    body = {"model": model, "prompt": prompt, "max_tokens": _PROOF_TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = TimedAnswer()
    lines: list[tuple[float, str]] = []
    sent_at = time.perf_counter()
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            lines.append((time.perf_counter() - sent_at, line))
    for arrival, line in lines:
        if not line.startswith("data: {"):
            continue
        part = json.loads(line[6:])
        answer.tokens = (part.get("usage") or {}).get("completion_tokens", answer.tokens)
        for choice in part["choices"]:
            if choice["text"]:
                answer.text += choice["text"]
                answer.at.append(arrival)
    return answer


async def _model_of(http: httpx.AsyncClient, url: str) -> str:
    answer = await http.get(f"{url}/v1/models")
    return str(answer.raise_for_status().json()["data"][0]["id"])


async def _text(target: Target) -> list[tuple[str, str]]:
    """Compare the greedy texts of all APIs, and transformers' text of the engine's ids."""
    from transformers import AutoTokenizer

    hugging = AutoTokenizer.from_pretrained(target.tokenizer)
    decode = partial(hugging.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    async with Client(target.grpc) as client, _http() as http:
        models = f"{target.http}/v2/models"
        engine = GrpcEngine(target.grpc, target.engine_model, len(hugging))
        name = await _model_of(http, target.openai)

        async def streamed(prompt: str) -> str:
            request = client.stream(text_input=prompt, max_tokens=_PROOF_TOKENS, stream=True)
            async with request as stream:
                return "".join([event.text async for event in stream])

        async def transformers(prompt: str) -> str:
            ids = hugging.encode(prompt)
            answer = await continued(engine, tuple(ids), _PROOF_TOKENS, hugging.eos_token_id)
            return str(decode([*ids, *answer]))[len(decode(ids)) :]

        async def completions(prompt: str) -> str:
            return (await _complete(http, target.openai, name, prompt)).text

        apis: dict[str, Callable[[str], Awaitable[str]]] = {
            "gRPC, streamed": streamed,
            "HTTP generate": partial(_generate, http, f"{models}/{BLS.name}"),
            "HTTP generate_stream": partial(_generate_stream, http, f"{models}/{BLS.name}"),
            "OpenAI completions, streamed": completions,
        }
        if await _has_model(target, ENSEMBLE_NAME):
            apis[ENSEMBLE_NAME] = partial(_generate, http, f"{models}/{ENSEMBLE_NAME}")
        if await _has_model(target, target.engine_model):
            apis["transformers, of the engine's ids"] = transformers
            await engine.capacity()
        expected = []
        for prompt in _PROOF_PROMPTS:
            result = await client.generate(text_input=prompt, max_tokens=_PROOF_TOKENS)
            expected.append(result.text)
        rows = []
        for api, complete in apis.items():
            equal = 0
            for prompt, text in zip(_PROOF_PROMPTS, expected, strict=True):
                equal += await complete(prompt) == text
            rows.append((api, _equality(equal)))
        await engine.close()
        return rows


def _equality(equal: int) -> str:
    """Return the verdict for the number of prompts that have the same text twice."""
    verdict = f"{equal} of {len(_PROOF_PROMPTS)} texts equal"
    if equal < len(_PROOF_PROMPTS):
        verdict = f"FAILED: {verdict}"
    return verdict


async def _running(http: httpx.AsyncClient, target: Target) -> int | None:
    """Count the requests that the engine runs, by its own figure; ``None`` where it has none."""
    exposition = await http.get(f"{target.metrics}/metrics")
    counts = _RUNNING.findall(exposition.text)
    if not counts:
        return None
    return sum(map(int, counts))


async def _ends(target: Target) -> list[tuple[str, str]]:
    """Measure when the engine is idle after each way of ending a long answer."""
    long_request: dict[str, Any] = {
        "max_tokens": _LONG_PROMPT_WORDS,
        "end_id": -1,
        "text_input": _PROOF_PROMPTS[0],
    }
    rows = []
    async with Client(target.grpc) as client, _http() as http:
        if await _running(http, target) is None:
            return [("requests that the engine runs", "not told by this server")]
        name = await _model_of(http, target.openai)
        answer = await client.generate(text_input=_PROOF_PROMPTS[0], max_tokens=64, end_id=-1)
        stop_string = answer.text[-8:]

        async def becomes(busy: bool) -> bool:
            """Wait until the engine is busy or idle, which its figure shows once a second."""
            limit = time.monotonic() + _FREED_SECONDS
            while bool(await _running(http, target)) != busy and time.monotonic() < limit:
                await asyncio.sleep(0.1)
            return time.monotonic() < limit

        async def cancel_call() -> bool:
            async with client.stream(**long_request, stream=True) as stream:
                await stream.__anext__()
                return await becomes(busy=True)

        async def leave_stream() -> bool:
            body = {
                "model": name,
                "prompt": _PROOF_PROMPTS[0],
                "max_tokens": _LONG_PROMPT_WORDS,
                "stream": True,
                "ignore_eos": True,
            }
            url = f"{target.openai}/v1/completions"
            async with http.stream("POST", url, json=body) as response:
                lines = response.aiter_lines()  # the response ends with its iterator
                await anext(lines)
                return await becomes(busy=True)

        async def stop_at_string() -> bool:
            await client.generate(**long_request, stop_words=[stop_string])
            await asyncio.sleep(1.5)  # the figure changes once a second
            return True

        ways: dict[str, Callable[[], Awaitable[bool]]] = {
            "gRPC call cancelled": cancel_call,
            "OpenAI client left": leave_stream,
            "stop string": stop_at_string,
        }
        for way, end_answer in ways.items():
            if not await end_answer():
                problem = f"the engine's metric showed no request in {_FREED_SECONDS:g} s"
                rows.append((way, f"not seen: {problem}"))
                continue
            ended_at = time.monotonic()
            if await becomes(busy=False):
                duration = time.monotonic() - ended_at
                rows.append((way, f"the engine ran nothing {duration:.1f} s later"))
            else:
                rows.append((way, "FAILED: it still ran"))
    return rows


async def _speculation(target: Target) -> list[tuple[str, str]]:
    """Compare greedy texts with drafts and without, which have to be equal."""
    equal = 0
    draft_tokens = 0
    accepted_tokens = 0
    async with Client(target.grpc) as client:
        for prompt in _PROOF_PROMPTS:
            generate = partial(client.generate, text_input=prompt, max_tokens=_PROOF_TOKENS)
            plain = await generate(num_draft_tokens=0)
            result = await generate(num_draft_tokens=5, return_perf_metrics=True)
            equal += result.text == plain.text
            outputs = result.events[-1].outputs
            draft_tokens += int(outputs["total_draft_tokens"].reshape(-1)[0])
            accepted_tokens += int(outputs["total_accepted_draft_tokens"].reshape(-1)[0])
    if not draft_tokens:
        return [("drafts", "none were made here")]
    return [
        ("greedy, with drafts", _equality(equal)),
        ("accepted drafts", f"{accepted_tokens} of {draft_tokens}"),
    ]


async def _load(
    target: Target, second_url: str | None, seconds: float, rows: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Send the same prompts to each server in turns, at so many streams, for ``seconds`` each."""
    servers = {"trtllm-bls": target.openai}
    if second_url:
        servers["beside"] = second_url
    texts: dict[str, dict[str, str]] = {name: {} for name in servers}
    clients = max(1, (os.cpu_count() or 1) // 4)  # so that they do not limit a fast server
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(clients, context, end_with_parent, (os.getpid(),)) as pool:
        run = partial(asyncio.get_running_loop().run_in_executor, pool)
        # Importing takes a process a second, which is no part of the load.
        await asyncio.gather(*(run(_client, target.openai, 0.0, range(1)) for _ in range(clients)))
        for streams, name in itertools.product((1, 8, 32), servers):
            url = servers[name]
            process = target.process
            if url != target.openai:
                process = _process_at(httpx.URL(url).netloc.decode())
            cpu_s = _cpu_of(process)
            sent_at = time.monotonic()
            runs = []
            for client in range(min(clients, streams)):
                runs.append(run(_client, url, seconds, range(client, streams, clients)))
            answers = list(itertools.chain.from_iterable(await asyncio.gather(*runs)))
            duration_s = time.monotonic() - sent_at
            cpu_s = _cpu_of(process) - cpu_s
            tokens = 0
            for prompt, answer in answers:
                tokens += answer.tokens
                texts[name][prompt] = answer.text
            rate = round(tokens / duration_s, 1)
            row = {"server": name, "streams": streams, "tokens/s": rate}
            row |= _times([answer for _, answer in answers])
            if process is not None and tokens:
                row["CPU per token, µs"] = round(cpu_s / tokens * 1e6)
            rows.append(row)
            click.echo(f"  {streams} streams, {name}: {rate} tokens/s", err=True)
    results = [(f"{len(rows)} measurements", "see the table")]
    if second_url:
        own_texts, second_texts = texts.values()
        equal = 0
        for prompt, text in second_texts.items():
            equal += own_texts.get(prompt) == text
        results.append(("texts equal to those beside", f"{equal} of {len(second_texts)}"))
    return results


def _client(url: str, seconds: float, numbers: range) -> list[tuple[str, TimedAnswer]]:
    """Run the streams with these numbers and return their answers; in a process of its own."""

    async def run_streams() -> list[tuple[str, TimedAnswer]]:
        async with _http() as http:
            streams = [_completions(http, url, seconds, number) for number in numbers]
            return list(itertools.chain.from_iterable(await asyncio.gather(*streams)))

    return asyncio.run(run_streams())


async def _completions(
    http: httpx.AsyncClient, url: str, seconds: float, number: int
) -> list[tuple[str, TimedAnswer]]:
    """Run a stream after the other, each with the next prompt, and return their answers."""
    model = await _model_of(http, url)
    deadline = time.monotonic() + seconds
    answers: list[tuple[str, TimedAnswer]] = []
    while time.monotonic() < deadline:
        prompt = _PROOF_PROMPTS[(number + len(answers)) % len(_PROOF_PROMPTS)]
        answers.append((prompt, await _complete(http, url, model, prompt)))
    return answers


def _times(answers: list[TimedAnswer]) -> dict[str, float]:
    """Return the milliseconds to the first part, and those between parts."""
    ttft: list[float] = []
    gaps: list[float] = []
    for answer in answers:
        ttft += answer.at[:1]
        for start, end in itertools.pairwise(answer.at):
            gaps.append(end - start)
    times = {}
    if ttft:
        times["TTFT p50, ms"] = _percentile_ms(ttft, 50)
        times["TTFT p99, ms"] = _percentile_ms(ttft, 99)
    if gaps:
        times["gaps p99, ms"] = _percentile_ms(gaps, 99)
    return times


def _percentile_ms(seconds: list[float], percent: int) -> float:
    value = sorted(seconds)[(len(seconds) - 1) * percent // 100]
    return round(value * 1000, 1)


def _process_at(address: str) -> psutil.Process | None:
    """Find the process that listens at an address of this machine; the oldest of several."""
    pids = listening_processes(address)
    if not pids:
        return None
    return psutil.Process(min(pids))


def _cpu_of(process: psutil.Process | None) -> float:
    """Return the CPU seconds of a process and all below it."""
    if process is None:
        return 0.0
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(member.cpu_times()[:2])
    return total


# --- the page ----------------------------------------------------------------------------------


def page(report: Report) -> str:
    """Write the report as Markdown, for an issue."""

    def table(head: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> str:
        lines = [head, ("---",) * len(head), *rows]
        return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)

    parts = ["# trtllm-bls prove\n", table(("what", "is"), iter(report.machine.items()))]
    for name, rows in report.sections.items():
        parts.append(f"## {name}\n\n{table(('check', 'result'), iter(rows))}")
    if report.load:
        columns: dict[str, None] = {}
        for row in report.load:
            columns |= dict.fromkeys(row)
        cells = []
        for row in report.load:
            cells.append(tuple(row.get(column, "") for column in columns))
        load_table = table(tuple(columns), iter(cells))
        parts.append(f"{load_table}\n![tokens/s and TTFT by streams](load.svg)\n")
    return "\n".join(parts)


def plot(load: list[dict[str, Any]]) -> str:
    """Draw bars for each row of load: tokens/s, and the time to first token."""
    lines = []
    y = 20
    for key, color in (("tokens/s", "#2b5d9b"), ("TTFT p50, ms", "#c05a1c")):
        lines.append(f'<text x="10" y="{y}" font-weight="bold">{key}</text>')
        maximum = max((row.get(key, 0) for row in load), default=0) or 1
        for row in load:
            y += 22
            width = round(300 * row.get(key, 0) / maximum)
            lines.append(f'<text x="10" y="{y}">{row["server"]}, {row["streams"]}</text>')
            lines.append(f'<rect x="160" y="{y - 12}" width="{width}" height="15" fill="{color}"/>')
            lines.append(f'<text x="{166 + width}" y="{y}">{row.get(key, "")}</text>')
        y += 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="{y}"'
    return f'{head} font-family="sans-serif" font-size="13">\n' + "\n".join(lines) + "\n</svg>\n"
