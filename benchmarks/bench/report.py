"""The conditions, the tables, the JSON file and the plot of one run."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import Row
from bench.repository import roles_of

# Of a brightness that reads on a light page and on a dark one, as the text and the grid.
_COLOURS = ("#808080", "#b07d2b", "#2f7fc1", "#3f9d5a", "#c0504d", "#8a63b8", "#3a9a9a")
_INK = "#808080"


console = Console(width=None if sys.stdout.isatty() else 220)


def conditions(options: argparse.Namespace, client: str = "") -> dict[str, Any]:
    """What a reader must know to repeat the run."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = ("trtllm-bls", "nvidia-pytriton", "tritonclient", "grpcio", "numpy")
    packages += ("torch", "transformers")
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "client": client,
        "settings": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
    }


def print_conditions(options: argparse.Namespace, client: str = "") -> None:
    """A line for each of the run's conditions."""
    for name, value in conditions(options, client).items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show_short(rows: Sequence[Row], conditions: dict[str, Any], drafts: str) -> None:
    """One table of the steady load; below it ``drafts``, a line, and the conditions."""
    names = ("streams", "target", "tokens/s", "of direct", "TTFT p50", "ITL p99", "CPU model")
    console.print(_table(rows, names))
    if drafts:
        console.print(drafts, markup=False, highlight=False)
    settings, load = conditions["settings"], conditions["load"]
    wrong = sum(row.bad for row in rows)
    console.print(
        "direct: the engine itself; bls: tensorrt_llm_bls; openai: the OpenAI API.\n"
        "TTFT (time to first token) and ITL (inter-token latency) in ms. CPU: of the process\n"
        "between client and engine, in µs per token. The engine is scripted: a token per stream\n"
        f"every {settings['step_ms']:g} ms, answers of {settings['tokens']} tokens. "
        f"Answers: {sum(row.answers for row in rows)}, wrong: {wrong}.\n"
        f"{conditions['cores']} cores, {conditions['cpu']}, load {load} at the start; "
        f"Python {conditions['python']};\nclient: {conditions['client']}.",
        markup=False,
        highlight=False,
    )
    _show_problems(rows)


def show(rows: Sequence[Row]) -> None:
    """Steady load, then bursts, in which all requests arrive at once; "of direct" and "added" are
    to the engine's own gRPC in this run."""
    for mode in ("steady", "burst"):
        of_mode = [row for row in rows if row.mode == mode]
        if of_mode:
            title = (
                f"{mode}; times in ms; token: time between responses / tokens; CPU: µs per token"
            )
            console.print(_table(of_mode, title=title))
    _show_problems(rows)


def _show_problems(rows: Sequence[Row]) -> None:
    for row in rows:
        for problem, count in row.problems.items():
            console.print(f"{row.target}, {row.streams} {row.mode}: {count} x {problem}")


def _table(rows: Sequence[Row], names: Sequence[str] = (), title: str | None = None) -> Table:
    """The columns ``names``, or else all that a row fills."""
    lines = [_cells(rows, row) for row in rows]
    names = names or [name for name in lines[0] if any(line[name] for line in lines)]
    table = Table(title=title)
    for name in names:
        left = name == "target"
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for line in lines:
        table.add_row(*(line[name] for name in names))
    return table


def _cells(rows: Sequence[Row], row: Row) -> dict[str, str]:
    direct = _direct(rows, row)
    added = added_p99 = share = ""
    if direct is not None and direct is not row:
        added = f"{row.ttft_p50 - direct.ttft_p50:+.1f}"
        added_p99 = f"{row.ttft_p99 - direct.ttft_p99:+.1f}"
    if direct is not None and direct.tokens_per_s and row.tokens_per_s is not None:
        share = f"{row.tokens_per_s / direct.tokens_per_s:.0%}"
    return {
        "streams": str(row.streams),
        "step": f"{row.step_ms:g}",
        "target": row.target,
        "tokens/s": _number(row.tokens_per_s, 0),
        "of direct": share,
        "TTFT p50": _number(row.ttft_p50, 1),
        "added": added,
        "TTFT p99": _number(row.ttft_p99, 1),
        "added p99": added_p99,
        "ITL p99": _number(row.itl_p99, 2),
        "token p50": _number(row.token_p50, 2),
        "token p99": _number(row.token_p99, 2),
        "gap p99": _number(row.gap_p99, 1),
        "resp/token": _number(row.responses_per_token, 2),
        "CPU server": _number(row.cpu.get("server"), 0),
        "CPU model": _number(row.cpu.get("model"), 0),
        "engine": _number(row.cpu.get("engine"), 0),
        "RSS MB": _number(row.rss_mb, 0),
        "PSS MB": _number(row.pss_mb, 0),
        "shm MB": _number(row.shm_mb, 0),
        "bad": f"{row.bad}/{row.answers}",
    }


def save(file: Path, conditions: dict[str, Any], rows: Sequence[Row]) -> None:
    """Everything measured; NaN, where nothing was, becomes null."""
    text = json.dumps({"conditions": conditions, "rows": [asdict(row) for row in rows]})
    plain = json.loads(text, parse_constant=lambda _: None)
    file.write_text(json.dumps(plain, indent=1) + "\n")


def plot(file: Path, rows: Sequence[Row], caption: str) -> None:
    """Two panels as SVG: tokens per second, and CPU of server and model, against streams."""
    steady = [row for row in rows if row.mode == "steady"]
    panels: list[tuple[str, Callable[[Row], float | None]]] = [
        ("tokens/s", lambda row: row.tokens_per_s),
        ("CPU of tritonserver and model, µs per token", _front_cpu),
    ]
    body = [_panel(steady, 20 + 420 * n, *panel) for n, panel in enumerate(panels)]
    targets = list(dict.fromkeys(row.target for row in steady))
    for n, target in enumerate(targets):
        x = 60 + 110 * n
        body.append(f'<rect x="{x}" y="306" width="14" height="4" fill="{_colour(n)}"/>')
        body.append(f'<text x="{x + 20}" y="312">{target}</text>')
    body.append(f'<text x="60" y="334">{caption}</text>')
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="345" font-size="12" '
    style = f'font-family="sans-serif" fill="{_INK}">'
    file.write_text("\n".join([head + style, *body, "</svg>"]) + "\n")


def _panel(rows: Sequence[Row], left: int, title: str, value: Callable[[Row], float | None]) -> str:
    streams = sorted({row.streams for row in rows})
    top = max((value(row) or 0 for row in rows), default=0) * 1.05 or 1
    widest = math.log2(streams[-1] / streams[0]) or 1

    def x(count: int) -> float:
        return left + 50 + 330 * math.log2(count / streams[0]) / widest

    def y(amount: float) -> float:
        return 260 - 220 * amount / top

    parts = [f'<text x="{left + 50}" y="24" font-weight="bold">{title}</text>']
    for part in range(5):
        amount = top * part / 4
        line = f'x1="{left + 50}" x2="{left + 380}" y1="{y(amount):.0f}" y2="{y(amount):.0f}"'
        parts.append(f'<line {line} stroke="{_INK}" stroke-opacity="0.25"/>')
        place = f'x="{left + 44}" y="{y(amount) + 4:.0f}" text-anchor="end"'
        parts.append(f"<text {place}>{amount:,.0f}</text>")
    for count in streams:
        parts.append(f'<text x="{x(count):.0f}" y="280" text-anchor="middle">{count}</text>')
    for n, target in enumerate(dict.fromkeys(row.target for row in rows)):
        known = [(row.streams, value(row)) for row in rows if row.target == target]
        points = " ".join(f"{x(c):.0f},{y(v):.0f}" for c, v in sorted(known) if v is not None)
        line = f'fill="none" stroke="{_colour(n)}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {line}/>')
    return "\n".join(parts)


def _front_cpu(row: Row) -> float | None:
    return row.cpu.get("server", 0.0) + row.cpu["model"] if row.cpu else None


def _colour(n: int) -> str:
    return _COLOURS[n % len(_COLOURS)]


def _direct(rows: Sequence[Row], row: Row) -> Row | None:
    """The engine's own gRPC under the same load."""
    base = "service" if "double" in roles_of(row.target)["engine"] else "direct"
    load = (row.mode, row.streams, row.step_ms)
    same = (r for r in rows if r.target == base and (r.mode, r.streams, r.step_ms) == load)
    return next(same, None)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.{digits}f}"
