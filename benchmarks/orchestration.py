"""What orchestration costs: a real tritonserver, an engine that costs next to nothing, and between
client and engine nothing, as little as possible, tensorrt_llm_bls, the ensemble, or the OpenAI API.

Every answer is checked to the character. Targets take turns under each load, so ratios are within
one run. perf_analyzer makes the load where it runs, else a client of our own in several processes;
the OpenAI API always has the latter. Prints one table, with --full everything that was measured.

examples:
  python benchmarks/orchestration.py                               two minutes, 2 cores
  python benchmarks/orchestration.py --full --json run.json --plot docs/orchestration.svg
  python benchmarks/orchestration.py --full --targets direct,bls,bls_4 --streams 128,256
  python benchmarks/orchestration.py --full --targets direct,bls,bls_4 --streams 2048 --step-ms 50
  python benchmarks/orchestration.py --url gpu-host:8001 --model tensorrt_llm_bls --streams 1,64
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import repository
from bench.answers import (
    Answer,
    Request,
    id_request,
    make_prompts,
    plain_request,
    staggered,
    text_request,
)
from bench.arguments import parser_of
from bench.figures import Row, burst_row, steady_row
from bench.http_load import HttpLoad
from bench.load import Load
from bench.perf_analyzer import PerfAnalyzer, find
from bench.processes import Processes
from bench.report import plot, save, show, show_short
from bench.servers import openai_command, running
from rich.console import Console
from speculation import summary

from tests.helpers.processes import unused_ports
from trtllm_bls.operate.preparation import SENDING_THREADS
from trtllm_bls.operate.tritonserver import ServerFailed, TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings

MODEL = repository.ROOT / "assets" / "demo" / "target"
TARGETS, SHORT_TARGETS = "direct,empty,bls,bls_2,bls_4,ensemble", "direct,bls,openai"
KNOWN = r"direct|empty|ensemble|pipeline|by_hand|openai|bls(_[1-9]\d*)?(/[1-9]\d*)?"
BURST_TOKENS = 20
BURST_WAVES = {1: 1, 32: 4, 128: 4}  # by requests at once; otherwise 2
ALONE = 20  # requests one after the other, where one at once is asked for
PROMPTS = 64
PLAIN_PROMPTS = (
    "Write a long story about a fox who learns to read.",
    "Explain in detail how a steam engine works.",
    "What happened in the year 1848 in Europe?",
    "List and describe the planets of the solar system.",
)
console = Console(width=None if sys.stdout.isatty() else 170)


class Bench:
    """Asks one target after the other; ``processes`` is the server's, where it is ours."""

    def __init__(self, options: argparse.Namespace, client: Any, url: str) -> None:
        self._options, self._client, self._url = options, client, url
        self.processes: Processes | None = None
        self.openai: tuple[HttpLoad, int] | None = None  # its client, and its port
        self._fastest: dict[str, float] = {}  # tokens/s of each target so far
        if options.url is None:
            file = MODEL / "tokenizer.json"
            self._prompts = make_prompts(file, PROMPTS, options.prompt_tokens)

    def steady(self, target: str, streams: int) -> Row:
        """All streams busy for about ``--seconds``, more where one wave of answers is longer."""
        length = self._options.tokens
        rate = streams * 1000 / self._options.step_ms
        if target in self._fastest:
            rate = min(rate, 1.3 * self._fastest[target])
        waves = max(1, round(self._options.seconds * rate / (streams * length)))
        answers = self._ask(target, staggered(streams, waves, length))
        row = steady_row(target, streams, answers, self.processes)
        self._fastest[target] = max(self._fastest.get(target, 0), row.tokens_per_s or 0)
        return row

    def burst(self, target: str, streams: int) -> Row:
        """``streams`` requests at once, some times over."""
        answers: list[Answer] = []
        each = ALONE if streams == 1 else 1
        for _ in range(BURST_WAVES.get(streams, 2)):
            answers += self._ask(target, [[BURST_TOKENS] * each] * streams)
        return burst_row(target, streams, answers)

    def warm_up(self, target: str) -> None:
        """One answer, so that nothing is done for the first time while it is measured."""
        answers = self._ask(target, [[BURST_TOKENS]])
        if answers[0].problem:
            raise SystemExit(f"error: {target} does not answer rightly: {answers[0].problem}")

    def _ask(self, target: str, lengths: list[list[int]]) -> list[Answer]:
        plan = [
            [self._request(target, stream + turn, length) for turn, length in enumerate(one)]
            for stream, one in enumerate(lengths)
        ]
        if target == "openai":
            assert self.openai is not None
            client, port = self.openai
            return list(client.ask(port, MODEL.name, plan))
        output = "output_ids" if target == "direct" else "text_output"
        model = target if self._options.url else repository.model_of(target)
        return list(self._client.ask(self._url, model, output, plan))

    def _request(self, target: str, number: int, length: int) -> Request:
        if self._options.url is not None:
            return plain_request(PLAIN_PROMPTS[number % len(PLAIN_PROMPTS)], length)
        prompt = self._prompts[number % len(self._prompts)]
        if target in ("direct", "empty"):
            return id_request(prompt, length)
        return text_request(prompt, length, int(target.partition("/")[2] or 1))


def measure(bench: Bench, options: argparse.Namespace) -> list[Row]:
    """Every load, and under each load every target; with --full a line for each."""
    work = [(bench.burst, streams) for streams in options.bursts]
    work = [(bench.steady, streams) for streams in options.streams] + work
    rows: list[Row] = []
    for target in options.targets:
        bench.warm_up(target)
    begun, total = time.monotonic(), len(work) * len(options.targets)
    for run, streams in work:
        for target in options.targets:
            row = run(target, streams)
            rows.append(row)
            if not options.full:
                continue
            rate = f"{row.tokens_per_s:,.0f} tokens/s, " if row.tokens_per_s is not None else ""
            head = f"[{len(rows)}/{total}, {time.monotonic() - begun:.0f} s]"
            tail = f"TTFT p50 {row.ttft_p50:.1f} ms" + (f", {row.bad} BAD" if row.bad else "")
            console.print(f"{head} {row.mode} {streams} {target}: {rate}{tail}", markup=False)
    return rows


@contextmanager
def serving(
    targets: list[str], engine_instances: int, step_ms: float, max_streams: int
) -> Iterator[TritonServer]:
    """A server with every target's models in it."""
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory) / "models"
        repository.write(models, targets, engine_instances)
        settings = ServeSettings(
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            openai_port=0,
            model=MODEL,
            model_repository=models,
            max_streams=max_streams,
            thread_pool_size=SENDING_THREADS,  # the engine stands for one in C++
            overrides=(Override(repository.ENGINE, "step_ms", str(step_ms)),),
        )
        with TritonServer(settings) as server:
            yield server


def conditions(options: argparse.Namespace, client: str) -> dict[str, Any]:
    """What a reader must know to repeat the run."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = ("trtllm-bls", "nvidia-pytriton", "tritonclient", "grpcio", "numpy")
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "client": client,
        "settings": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except Exception:
        return "not installed"


def choose_client(options: argparse.Namespace, scratch: Path) -> PerfAnalyzer | Load:
    """perf_analyzer if it is there and runs, unless the own client is asked for."""
    program = None if options.client == "own" else find(options.perf_analyzer)
    if program is not None:
        try:
            return PerfAnalyzer(program, scratch)
        except OSError as error:
            if options.client == "perf_analyzer":
                raise SystemExit(f"error: {error}") from None
            console.print(f"{error}; using the own client", markup=False)
    elif options.client == "perf_analyzer":
        raise SystemExit("error: no perf_analyzer: `make bench` fetches it, or --perf-analyzer")
    return Load(options.client_processes)


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",") if part]
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}: whole numbers from 1, with commas between")
    return values


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help="more loads and targets, and all that was measured")
    add(
        "--targets",
        help=f"default {SHORT_TARGETS}, full {TARGETS}; bls_N: N processes; bls/N: stream_interval",
    )
    add("--streams", type=numbers, help="default 1,8,32, full 1,8,32,128,256,512; '' for none")
    add("--bursts", type=numbers, help="requests at once; default none, full 1,32,128")
    add("--seconds", type=float, default=4, help="of steady load, at least; default 4")
    add("--tokens", type=int, default=100, help="of each answer; default 100")
    add("--prompt-tokens", type=int, default=20, help="of each prompt; default 20")
    add("--step-ms", type=float, default=10, help="the engine's step; default 10")
    instances = 4 if cores >= 8 else 1
    add("--engine-instances", type=int, default=instances, help=f"default here {instances}")
    add("--client", choices=("auto", "perf_analyzer", "own"), default="auto")
    add("--client-processes", type=int, default=max(1, min(4, cores // 4)), help="of the own one")
    add("--perf-analyzer", type=Path, help="the program, where it is not on the PATH")
    add("--url", help="a running server's gRPC port, host:port; nothing is started then")
    add("--model", default=repository.BLS, help="the text model there; default tensorrt_llm_bls")
    add("--json", type=Path, help="a file for all figures")
    add("--plot", type=Path, help="a file for a plot (SVG)")
    options = parser.parse_args()
    if options.streams is None:
        options.streams = [1, 8, 32, 128, 256, 512] if options.full else [1, 8, 32]
    if options.bursts is None:
        options.bursts = [1, 32, 128] if options.full else []
    named = options.targets or (TARGETS if options.full else SHORT_TARGETS)
    options.targets = [options.model] if options.url else named.split(",")
    for target in [] if options.url else options.targets:
        if not re.fullmatch(KNOWN, target):
            known = "direct, empty, ensemble, pipeline, by_hand, openai, bls, bls_N or bls/N"
            parser.error(f"--targets {target}: {known}")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        client = choose_client(options, scratch)
        setting = conditions(options, client.name)
        for name, value in setting.items() if options.full else ():
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
        working = nullcontext() if options.full else console.status("measuring, about two minutes")
        drafts = ""
        try:
            with working:
                rows = _run(options, client)
                if not (options.full or options.url):
                    drafts = asyncio.run(summary())
        except ServerFailed as error:
            raise SystemExit("\n".join([f"error: {error}", *error.log_lines])) from None
        except OSError as error:
            raise SystemExit(f"error: {error}") from None
        finally:
            client.close()
    if options.full:
        show(console, rows)
    else:
        show_short(console, rows, setting, drafts)
    if options.json:
        save(options.json, setting, rows)
    if options.plot:
        plot(
            options.plot,
            rows,
            f"{setting['cores']} cores, {setting['cpu']}; {client.name}",
        )
    return 1 if any(row.bad for row in rows) else 0


def _run(options: argparse.Namespace, client: PerfAnalyzer | Load) -> list[Row]:
    if options.url is not None:
        return measure(Bench(options, client, options.url), options)
    most = max(*options.streams, *options.bursts, 32) + 16
    with ExitStack() as stack:
        serve = serving(options.targets, options.engine_instances, options.step_ms, most)
        server = stack.enter_context(serve)
        bench, others = Bench(options, client, server.grpc_url), {}
        if "openai" in options.targets:
            (port,) = unused_ports(1)
            command = openai_command(port, MODEL, 1, "--engine-url", server.grpc_url)
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "openai.log"
            others["openai"] = stack.enter_context(running(command, port, log))
            http = HttpLoad(options.client_processes)
            stack.callback(http.close)
            bench.openai = http, port
        bench.processes = Processes(server.region_prefix, others)
        stack.callback(bench.processes.close)
        return measure(bench, options)


if __name__ == "__main__":
    sys.exit(main())
