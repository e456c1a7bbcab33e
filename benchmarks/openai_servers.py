"""What an OpenAI server costs: ours and others over the same scripted engine, side by side.

Engines: one process of TrtllmService, or several, which gives 50,000 tokens/s and more, and a real
tritonserver with a scripted model. Servers over each: ours with as many workers as by default, with
one (`ours_1`), and `smg` over the TrtllmService. Same prompts, step, tokenizer and clients; the
servers take turns under each load. Every answer is checked to the character, but for those of
`--unchecked` servers, which run already, over engines of their own. `direct` asks the engine's own
gRPC. CPU is user and system time of all of a server's processes (/proc), per token; MB are their
PSS, in which memory that they share counts once.

examples:
  python benchmarks/openai_servers.py --targets direct,ours,smg --smg VENV/bin/smg --loads 32,128
  python benchmarks/openai_servers.py --smg VENV/bin/smg --json run.json       every target and load

smg: python -m venv VENV; VENV/bin/pip install smg==1.13.0 setproctitle pyyaml grpcio
     grpcio-health-checking
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench import repository
from bench.answers import (
    Answer,
    Request,
    id_request,
    make_prompts,
    staggered,
    steady_window,
    text_request,
)
from bench.arguments import parser_of
from bench.figures import Row, steady_row
from bench.http_load import HttpLoad
from bench.load import Load
from bench.processes import Processes
from bench.report import save
from bench.servers import openai_command, running
from bench.stepping import Doubles
from orchestration import MODEL, conditions, serving
from rich.console import Console
from rich.table import Table

from tests.helpers.processes import unused_ports

TARGETS = "direct,ours,ours_1,smg,triton_direct,triton_ours,triton_ours_1"
LOADS = "1,32,128,256,512,1024@50,2048@50,2048@25,1024"
PROMPTS, WARM_UP = 64, 20
MOST_STREAMS = 2100  # of the Triton engine
console = Console(width=None if sys.stdout.isatty() else 160)


@dataclass(frozen=True)
class Work:
    """So many streams, each with a token every ``step_ms``."""

    streams: int
    step_ms: float


@dataclass
class Server:
    """A target that runs: its HTTP port, or where it has none the engine's gRPC."""

    name: str
    port: int = 0
    model: str = MODEL.name
    triton: str = ""
    checked: bool = True


class Bench:
    """Asks one server after the other."""

    def __init__(self, options: argparse.Namespace, http: HttpLoad, grpc: Load) -> None:
        self._options, self._http, self._grpc = options, http, grpc
        self._prompts = make_prompts(MODEL / "tokenizer.json", PROMPTS, 20)

    def row(self, server: Server, work: Work, ports: list[int], processes: Processes) -> Row:
        """All streams busy for about ``--seconds``, of which the first quarter does not count."""
        length = self._options.tokens
        rate = min(work.streams * 1000 / work.step_ms, self._options.most)
        waves = max(1, round(self._options.seconds * rate / (work.streams * length)))
        probe = server.port and work.streams >= self._options.health_at
        health = self._http.health(server.port, self._options.seconds) if probe else None
        answers = self.ask(server, staggered(work.streams, waves, length), ports)
        row = steady_row(server.name, work.streams, answers, None)
        row.mode = f"{work.step_ms:g} ms"
        begin, end = steady_window(answers, work.streams)
        tokens = (row.tokens_per_s or 0) * (end - begin) / 1e9
        for role in processes.ids:
            row.cpu[role] = processes.cpu_seconds((role,), begin, end) / max(tokens, 1) * 1e6
        if server.name in processes.ids:
            row.pss_mb = processes.together_mb(server.name)
        if health is not None:
            found = health.get()
            row.health_p999 = float(np.percentile([ms for _, ms in found], 99.9))
            row.health = f"{sum(status == 200 for status, _ in found)}/{len(found)}"
        return row

    def ask(self, server: Server, lengths: list[list[int]], ports: list[int]) -> list[Answer]:
        make = text_request if server.port else id_request
        plan: list[list[Request]] = [
            [make(self._prompts[(n + turn) % PROMPTS], each) for turn, each in enumerate(one)]
            for n, one in enumerate(lengths)
        ]
        if not server.checked:
            plan = [[plain(request) for request in one] for one in plan]
        if server.port:
            return self._http.ask(server.port, server.model, plan)
        if server.triton:
            return self._grpc.ask(server.triton, repository.ENGINE, "output_ids", plan)
        return self._http.direct(ports, plan)

    def warm_up(self, server: Server, ports: list[int]) -> None:
        """Some answers to every worker, so that nothing is done for the first time."""
        answers = self.ask(server, [[WARM_UP]] * 32, ports)
        bad = next((answer.problem for answer in answers if answer.problem), None)
        if bad is not None:
            raise SystemExit(f"error: {server.name} does not answer rightly: {bad}")


def plain(request: Request) -> Request:
    """One of which no server knows more than OpenAI does, with an answer that is not known."""
    inputs = {key: each for key, each in request.inputs.items() if key != "add_special_tokens"}
    return Request(inputs)


def command_of(target: str, port: int, ports: list[int], triton: str, smg: str) -> list[str]:
    """What starts ``target`` at ``port``."""
    if target == "smg":
        workers = [f"grpc://127.0.0.1:{each}" for each in ports]
        where = ["--host", "127.0.0.1", "--port", str(port), "--model-path", str(MODEL)]
        rest = ["--prometheus-port", str(unused_ports(1)[0]), "--policy", "round_robin"]
        return [smg, "launch", *where, *rest, "--disable-retries", "--worker-urls", *workers]
    count = target.rpartition("_")[2] if target[-1].isdigit() else "auto"
    if target.startswith("triton"):
        return openai_command(port, MODEL, count, "--engine-url", triton)
    addresses = ",".join(f"127.0.0.1:{each}" for each in ports)
    return openai_command(port, MODEL, count, "--engine", f"trtllm://{addresses}")


def measure(options: argparse.Namespace, bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for step_ms in dict.fromkeys(work.step_ms for work in options.loads):
        with ExitStack() as stack:
            doubles = Doubles(options.engines, MODEL, step_ms / 1000)
            stack.callback(doubles.close)
            triton = ""
            if any(target.startswith("triton") for target in options.targets):
                server = serving(["direct"], options.engines, step_ms, MOST_STREAMS)
                triton = stack.enter_context(server).grpc_url
            servers, ids = [], {"double": doubles.ids}
            for target in options.targets:
                server = Server(target, triton=triton if target.startswith("triton") else "")
                servers.append(server)
                if not target.endswith("direct"):
                    (server.port,) = unused_ports(1)
                    arguments = (server.port, doubles.ports, triton, options.smg)
                    log = Path(options.logs) / f"{target}.log"
                    command = command_of(target, *arguments)
                    ids[target] = stack.enter_context(running(command, server.port, log))
            for name, port, pid in options.unchecked:
                servers.append(Server(name, int(port), checked=False))
                ids[name] = [int(pid)]
            processes = Processes("none", ids)
            stack.callback(processes.close)
            for server in servers:
                bench.warm_up(server, doubles.ports)
            for work in [each for each in options.loads if each.step_ms == step_ms]:
                for server in servers:
                    rows.append(bench.row(server, work, doubles.ports, processes))
                    row = rows[-1]
                    head = f"{work.streams} streams, {row.mode}, {server.name}"
                    tail = f"{row.tokens_per_s:,.0f} tokens/s, TTFT p50 {row.ttft_p50:.1f} ms, "
                    tail += f"p99 {row.ttft_p99:.1f}, CPU {row.cpu.get(server.name, 0):.1f}, "
                    tail += f"{row.pss_mb or 0:.0f} MB, bad {row.bad}"
                    console.print(f"{head}: {tail}", markup=False)
    return rows


def show(rows: list[Row]) -> None:
    table = Table(
        title="ms; CPU: µs per token of a server's processes, and of the engine's; MB: PSS"
    )
    names = ("streams", "step", "target", "tokens/s", "%", "TTFT p50", "added", "p99", "added")
    names += ("token p99", "ev/token", "CPU", "engine", "health p99.9", "MB", "bad")
    for name in names:
        table.add_column(name, justify="left" if name == "target" else "right")
    direct: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        kind = row.target.startswith("triton")
        if row.target.endswith("direct"):
            direct[row.mode, row.streams, kind] = row
        base = direct.get((row.mode, row.streams, kind), row)
        added = [f"{row.ttft_p50 - base.ttft_p50:+.1f}", f"{row.ttft_p99 - base.ttft_p99:+.1f}"]
        cpu = row.cpu.get(row.target)
        engine = ("tritonserver", repository.ENGINE) if kind else ("double",)
        used = sum(row.cpu.get(role, 0) for role in engine)
        table.add_row(
            str(row.streams),
            row.mode,
            row.target,
            f"{row.tokens_per_s or 0:,.0f}",
            f"{(row.tokens_per_s or 0) / (base.tokens_per_s or 1):.1%}",
            f"{row.ttft_p50:.1f}",
            "" if base is row else added[0],
            f"{row.ttft_p99:.1f}",
            "" if base is row else added[1],
            f"{row.token_p99 or 0:.1f}",
            f"{row.responses_per_token or 0:.2f}",
            "" if cpu is None else f"{cpu:.1f}",
            f"{used:.0f}",
            "" if row.health_p999 is None else f"{row.health_p999:.1f} ({row.health})",
            "" if row.pss_mb is None else f"{row.pss_mb:.0f}",
            f"{row.bad}/{row.answers}",
        )
    console.print(table)
    for row in rows:
        for problem, count in row.problems.items():
            console.print(f"{row.target}, {row.streams}: {count} x {problem}", markup=False)


def parse() -> argparse.Namespace:
    cores = os.cpu_count() or 1
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--targets", default=TARGETS, help=f"default {TARGETS}")
    add("--loads", default=LOADS, help=f"STREAMS[@STEP_MS], default {LOADS}")
    add("--step-ms", type=float, default=10, help="where a load names none; default 10")
    add("--seconds", type=float, default=4, help="of each load, at least; default 4")
    add("--most", type=float, default=50_000, help="tokens/s to plan for; default 50000")
    add("--tokens", type=int, default=100, help="of each answer; default 100")
    add("--engines", type=int, default=1, help="engine processes; default 1, as a replica has")
    add("--client-processes", type=int, default=max(1, min(4, cores // 4)))
    add("--health-at", type=int, default=1024, help="streams from which /health is asked too")
    add("--smg", default="smg", help="the program")
    add("--unchecked", default="", help="NAME:PORT:PID of a server, with the model `target`")
    add("--logs", default=tempfile.gettempdir(), help="a directory for the servers' logs")
    add("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    options.targets = options.targets.split(",")
    options.unchecked = [each.split(":") for each in options.unchecked.split(",") if each]
    options.loads = [
        Work(int(streams), float(step or options.step_ms))
        for streams, _, step in (each.partition("@") for each in options.loads.split(","))
    ]
    return options


def main() -> int:
    options = parse()
    http, grpc = HttpLoad(options.client_processes), Load(options.client_processes)
    setting = conditions(options, http.name)
    setting["settings"]["loads"] = [f"{work.streams}@{work.step_ms:g}" for work in options.loads]
    for name, value in setting.items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    try:
        rows = measure(options, Bench(options, http, grpc))
    finally:
        http.close()
        grpc.close()
    show(rows)
    if options.json:
        save(options.json, setting, rows)
    return 1 if any(row.bad for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
