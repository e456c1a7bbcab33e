"""What orchestration costs: servers over an engine that costs next to nothing, side by side.

Targets of one run take turns under each load, so ratios are within the run. Every answer is checked
to the character. perf_analyzer asks Triton's models where it runs, a client of our own all else.
Over a real tritonserver with a scripted model:

  direct            the engine's own model
  empty             a Python model of 50 lines that passes each response on
  bls, bls_4, bls/2 tensorrt_llm_bls; in four processes; with a stream_interval of 2
  ensemble, pipeline, by_hand
  openai, openai_4  the OpenAI API, one worker or four
  triton_http       generate_stream over Triton's own HTTP port
  generate          generate_stream over ours, port 8000

Over TrtllmServices, processes that give 50,000 tokens/s each and more:

  service           the services' own gRPC
  ours, ours_1      the OpenAI API, with as many workers as by default, or so many
  ours_1/chat       the same over another API: chat, responses or messages
  smg               the gateway, --smg

Prints one table, with --full everything that was measured. CPU is user and system time (/proc).

examples:
  python benchmarks/orchestration.py                               two minutes, 2 cores
  python benchmarks/orchestration.py --full --json run.json --plot docs/orchestration.svg
  python benchmarks/orchestration.py --full --targets direct,bls,bls_4 --streams 128,2048@50
  python benchmarks/orchestration.py --full --targets service,ours,smg --streams 8 --smg V/bin/smg
  python benchmarks/orchestration.py --full --targets bls --streams 8 --beside 1000000
  python benchmarks/orchestration.py --url gpu-host:8001 --model tensorrt_llm_bls --streams 1,64

smg: python -m venv V; V/bin/pip install smg==1.13.0 setproctitle pyyaml grpcio
     grpcio-health-checking
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from bench import repository
from bench.answers import (
    Answer,
    Prompt,
    Request,
    id_request,
    make_prompts,
    plain_request,
    staggered,
    text_request,
)
from bench.arguments import numbers, parser_of
from bench.figures import Row, burst_row, steady_row
from bench.load import Load, Target
from bench.perf_analyzer import PerfAnalyzer, find
from bench.processes import Processes, child_ids
from bench.report import conditions, console, plot, save, show, show_short
from bench.servers import openai_command, running, serving, smg_command
from bench.stepping import Doubles
from speculation import summary

from tests.helpers.ports import unused_ports
from trtllm_bls.client import Client
from trtllm_bls.operate.http_process import HttpProcess
from trtllm_bls.operate.tritonserver import ServerFailed, TritonServer

MODEL = repository.MODEL
TARGETS, SHORT_TARGETS = "direct,empty,bls,bls_2,bls_4,ensemble", "direct,bls,openai"
OVER_SERVICE = r"service|smg|ours(_[1-9]\d*)?(/(chat|responses|messages))?"
OVER_TRITON = r"direct|empty|ensemble|pipeline|by_hand|triton_http|generate|openai(_[1-9]\d*)?"
OVER_TRITON += r"|bls(_[1-9]\d*)?(/[1-9]\d*)?"
BURST_TOKENS = 20
BURST_WAVES = {1: 1, 32: 4, 128: 4}  # by requests at once; otherwise 2
ALONE = 20  # requests one after the other, where one at once is asked for
PROMPTS = 64
MOST_TOKENS_PER_S = 50_000  # to plan for
PAUSE_S = 0.2  # between two requests beside the load
PLAIN_PROMPTS = (
    "Write a long story about a fox who learns to read.",
    "Explain in detail how a steam engine works.",
    "What happened in the year 1848 in Europe?",
    "List and describe the planets of the solar system.",
)


class Bench:
    """Asks one target after the other, at engines with a step of ``step_ms``."""

    def __init__(
        self, options: argparse.Namespace, load: Load | PerfAnalyzer, step_ms: float
    ) -> None:
        self.targets: dict[str, Target] = {}
        self.processes: Processes | None = None  # of servers that are ours
        self._options, self._load, self._step_ms = options, load, step_ms
        self._fastest: dict[str, float] = {}  # tokens/s of each target so far
        self._prompts: list[Prompt] = []
        if options.url is None:
            file = MODEL / "tokenizer.json"
            self._prompts = make_prompts(file, PROMPTS, options.prompt_tokens)
        # A template puts ids before the prompt, so the services say the same to every request.
        self.says = self._prompts[0] if any("/" in t for t in over_service(options)) else None

    def steady(self, name: str, streams: int) -> Row:
        """All streams busy for about ``--seconds``, more where one wave of answers is longer."""
        length, seconds = self._options.tokens, self._options.seconds
        rate = min(streams * 1000 / self._step_ms, MOST_TOKENS_PER_S)
        if name in self._fastest:
            rate = min(rate, 1.3 * self._fastest[name])
        waves = max(1, round(seconds * rate / (streams * length)))
        answers = self._ask(name, staggered(streams, waves, length))
        row = steady_row(name, streams, answers, self.processes)
        row.step_ms = self._step_ms
        self._fastest[name] = max(self._fastest.get(name, 0), row.tokens_per_s or 0)
        return row

    def burst(self, name: str, streams: int) -> Row:
        """``streams`` requests at once, some times over."""
        answers: list[Answer] = []
        each = ALONE if streams == 1 else 1
        for _ in range(BURST_WAVES.get(streams, 2)):
            answers += self._ask(name, [[BURST_TOKENS] * each] * streams)
        row = burst_row(name, streams, answers)
        row.step_ms = self._step_ms
        return row

    def warm_up(self) -> None:
        """Some answers of every target, so that nothing is done for the first time later."""
        for name, target in self.targets.items():
            count = 1 if target.api == "triton" else 32  # some for every worker
            for answer in self._ask(name, [[BURST_TOKENS]] * count):
                if answer.problem:
                    raise SystemExit(f"error: {name} does not answer rightly: {answer.problem}")

    def _ask(self, name: str, lengths: list[list[int]]) -> list[Answer]:
        plan = [
            [self._request(name, stream + turn, length) for turn, length in enumerate(turns)]
            for stream, turns in enumerate(lengths)
        ]
        return self._load.ask(self.targets[name], plan)

    def _request(self, name: str, number: int, length: int) -> Request:
        if self._options.url is not None:
            return plain_request(PLAIN_PROMPTS[number % len(PLAIN_PROMPTS)], length)
        prompt = self._prompts[number % len(self._prompts)]
        says = prompt
        if self.says and re.fullmatch(OVER_SERVICE, name):
            says = self.says
        if name in ("direct", "empty", "service"):
            return id_request(prompt, length, says)
        interval = name.partition("/")[2] if name.startswith("bls") else ""
        return text_request(prompt, length, int(interval or 1), says)


def over_service(options: argparse.Namespace) -> list[str]:
    return [name for name in options.targets if re.fullmatch(OVER_SERVICE, name)]


@contextmanager
def started(options: argparse.Namespace, bench: Bench, step_ms: float) -> Iterator[None]:
    """Every target's server."""
    ids: dict[str, list[int]] = {}
    prefix = "none"
    with ExitStack() as stack:

        def start(name: str, command: list[str], port: int) -> None:
            log = Path(options.logs) / f"{name.replace('/', '_')}.log"
            ids[name] = stack.enter_context(running(command, port, log))

        services = over_service(options)
        if services:
            says = bench.says.ids if bench.says else []
            doubles = Doubles(options.engines, MODEL, step_ms / 1000, says)
            stack.callback(doubles.close)
            ids["double"] = doubles.ids
        for name in services:
            (port,) = unused_ports(1)
            server, _, api = name.partition("/")
            bench.targets[name] = Target(api or "completions", (f"127.0.0.1:{port}",), MODEL.name)
            if name == "service":
                bench.targets[name] = Target("service", tuple(doubles.urls))
            elif name == "smg":
                engines = [f"grpc://{url}" for url in doubles.urls]
                start(name, smg_command(options.smg, port, MODEL, *engines), port)
            else:
                engine = f"trtllm://{','.join(doubles.urls)}"
                workers = server.partition("_")[2] or "auto"
                start(name, openai_command(port, MODEL, workers, "--engine", engine), port)
        over_triton = [name for name in options.targets if name not in services]
        if over_triton:
            most = max(*(streams for streams, _ in options.streams), *options.bursts, 32) + 16
            serve = serving(over_triton, options.engine_instances, step_ms, most)
            triton = stack.enter_context(serve)
            prefix = triton.region_prefix
        for name in over_triton:
            (port,) = unused_ports(1)
            url = f"127.0.0.1:{port}"
            output = "output_ids" if name == "direct" else "text_output"
            model = repository.model_of(name)
            bench.targets[name] = Target("triton", (triton.grpc_url,), model, output)
            if name.startswith("openai"):
                bench.targets[name] = Target("completions", (url,), MODEL.name)
                workers, engine = name.partition("_")[2] or "1", triton.grpc_url
                start(name, openai_command(port, MODEL, workers, "--engine-url", engine), port)
            elif name == "triton_http":
                triton_port = triton.http_url.rpartition(":")[2]
                bench.targets[name] = Target("generate", (f"127.0.0.1:{triton_port}",))
            elif name == "generate":
                bench.targets[name] = Target("generate", (url,))
                ids[name] = stack.enter_context(port_8000(triton, port))
        if options.beside:
            stack.enter_context(beside(triton.grpc_url, options.beside))
        bench.processes = Processes(prefix, ids)
        stack.callback(bench.processes.close)
        yield


@contextmanager
def port_8000(triton: TritonServer, port: int) -> Iterator[list[int]]:
    """This package's HTTP program in front of ``triton``; the ids of its processes."""
    triton.settings = replace(triton.settings, http_port=port)
    triton.behind_http = True
    before = child_ids()
    front = HttpProcess(triton, False, print, lambda line: None)
    try:
        front.start()
        yield sorted(child_ids() - before)
    finally:
        front.close()


@contextmanager
def beside(url: str, size: int) -> Iterator[None]:
    """Requests with a prompt of ``size`` characters, one after the other, while targets are
    measured; prints how long they took."""
    seconds: list[float] = []
    ending = threading.Event()

    async def ask() -> None:
        async with Client(url) as client:
            while not ending.is_set():
                begun = time.monotonic()
                prompt = (" abcdefghi" * (size // 10 + 1))[:size]
                await client.generate(text_input=prompt, max_tokens=1)
                seconds.append(time.monotonic() - begun)
                await asyncio.sleep(PAUSE_S)

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        mean = sum(seconds) / max(len(seconds), 1)
        console.print(f"beside: {len(seconds)} prompts of {size:,} characters, {mean:.3f} s each")


def choose_load(options: argparse.Namespace, scratch: Path) -> Load | PerfAnalyzer:
    """perf_analyzer for Triton's models, if it is there and runs and is not forbidden."""
    own = Load(options.client_processes)
    program = None if options.own_client else find(options.perf_analyzer)
    try:
        return own if program is None else PerfAnalyzer(program, scratch, own)
    except OSError as error:
        console.print(f"{error}; using the own client", markup=False)
        return own


def measure(options: argparse.Namespace, load: Load | PerfAnalyzer) -> list[Row]:
    """Every load, and under each load every target; with --full a line for each."""
    rows: list[Row] = []
    work = [("steady", *streams) for streams in options.streams]
    work += [("burst", streams, options.step_ms) for streams in options.bursts]
    begun = time.monotonic()
    for step_ms in dict.fromkeys(step_ms for _, _, step_ms in work):
        bench = Bench(options, load, step_ms)
        if options.url:
            bench.targets = {options.model: Target("triton", (options.url,), options.model)}
        with started(options, bench, step_ms) if not options.url else nullcontext():
            bench.warm_up()
            for mode, streams, _ in [each for each in work if each[2] == step_ms]:
                for name in bench.targets:
                    run = bench.steady if mode == "steady" else bench.burst
                    rows.append(run(name, streams))
                    if options.full:
                        print_progress(rows[-1], time.monotonic() - begun)
    return rows


def print_progress(row: Row, seconds: float) -> None:
    rate = f"{row.tokens_per_s:,.0f} tokens/s, " if row.tokens_per_s is not None else ""
    bad = f", {row.bad} BAD" if row.bad else ""
    line = f"[{seconds:.0f} s] {row.mode} {row.streams} {row.target}: {rate}"
    console.print(f"{line}TTFT p50 {row.ttft_p50:.1f} ms{bad}", markup=False)


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help="more loads and targets, and all that was measured")
    add("--targets", help=f"default {SHORT_TARGETS}, full {TARGETS}")
    add("--streams", help="N or N@STEP_MS; default 1,8,32, full 1,8,32,128,256,512; '' for none")
    add("--bursts", type=numbers, help="requests at once; default none, full 1,32,128")
    add("--seconds", type=float, default=4, help="of steady load, at least; default 4")
    add("--tokens", type=int, default=100, help="of each answer; default 100")
    add("--prompt-tokens", type=int, default=20, help="of each prompt; default 20")
    add("--step-ms", type=float, default=10, help="the engine's step; default 10")
    add("--beside", type=int, default=0, metavar="N", help="prompts of N characters beside it")
    instances = 4 if cores >= 8 else 1
    add("--engine-instances", type=int, default=instances, help=f"default here {instances}")
    add("--engines", type=int, default=1, help="TrtllmServices; default 1, as a replica has")
    add("--client-processes", type=int, default=max(1, min(4, cores // 4)))
    add("--own-client", action="store_true", help="also where perf_analyzer is installed")
    add("--perf-analyzer", type=Path, help="the program, where it is not on the PATH")
    add("--smg", default="smg", help="the program")
    add("--url", help="a running server's gRPC port, host:port; nothing is started then")
    add("--model", default=repository.BLS, help="the text model there; default tensorrt_llm_bls")
    add("--logs", default=tempfile.gettempdir(), help="a directory for the servers' logs")
    add("--json", type=Path, help="a file for all figures")
    add("--plot", type=Path, help="a file for a plot (SVG)")
    options = parser.parse_args()
    if options.streams is None:
        options.streams = "1,8,32,128,256,512" if options.full else "1,8,32"
    loads = [load.partition("@") for load in options.streams.split(",") if load]
    options.streams = [(int(streams), float(step or options.step_ms)) for streams, _, step in loads]
    if options.bursts is None:
        options.bursts = [1, 32, 128] if options.full else []
    names = options.targets or (TARGETS if options.full else SHORT_TARGETS)
    options.targets = [] if options.url else names.split(",")
    for name in options.targets:
        if not re.fullmatch(f"{OVER_SERVICE}|{OVER_TRITON}", name):
            parser.error(f"--targets {name}: see --help for those that there are")
    if options.beside and "bls" not in options.targets:
        parser.error("--beside: needs the target bls")
    return options


def main() -> int:
    options = parse()
    scratch = tempfile.TemporaryDirectory()
    load = choose_load(options, Path(scratch.name))
    setting = conditions(options, load.name)
    for name, value in setting.items() if options.full else ():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    working = nullcontext() if options.full else console.status("measuring, about two minutes")
    drafts = ""
    try:
        with working:
            rows = measure(options, load)
            if not (options.full or options.url):
                drafts = asyncio.run(summary())
    except ServerFailed as error:
        raise SystemExit("\n".join([f"error: {error}", *error.log_lines])) from None
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        load.close()
        scratch.cleanup()
    if options.full:
        show(rows)
    else:
        show_short(rows, setting, drafts)
    if options.json:
        save(options.json, setting, rows)
    if options.plot:
        plot(options.plot, rows, f"{setting['cores']} cores, {setting['cpu']}; {load.name}")
    return 1 if any(row.bad for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
