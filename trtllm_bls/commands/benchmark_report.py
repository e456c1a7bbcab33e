"""A benchmark's figures for people, as tables and bars, or for programs as JSON."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtllm_bls.commands.benchmark_figures import (
    Comparison,
    Figures,
    Histogram,
    Outcome,
    compare,
    figures,
    histogram,
)
from trtllm_bls.errors import SettingsError

_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>benchmark</title><style>'
    ":root{{color-scheme:light dark}}{stylesheet}</style><pre>{code}</pre></html>\n"
)
_PAGE_WIDTH = 120  # characters
_BAR, _TEXT_BINS = 40, 10  # characters; lines
_TIMES = (("first token", "ttft_s"), ("whole answer", "whole_s"))


@dataclass(frozen=True)
class Run:
    """One mode: the outcomes of each server in the order of asking, and how long each worked."""

    mode: str
    outcomes: list[list[Outcome]]
    seconds: list[float]

    def figures(self) -> list[Figures]:
        """Of each server."""
        return [figures(*pair) for pair in zip(self.outcomes, self.seconds, strict=True)]

    def comparisons(self) -> list[Comparison]:
        """Of each server but the first."""
        return [compare(self.outcomes[0], other) for other in self.outcomes[1:]]

    def milliseconds(self, name: str) -> list[list[float]]:
        """Times of the requests that succeeded, by server."""
        return [
            [
                1000 * value
                for o in each
                if not o.problem and (value := getattr(o, name)) is not None
            ]
            for each in self.outcomes
        ]


def check_outputs(json_file: Path | None, html_file: Path | None, png_file: Path | None) -> None:
    """Raises ``SettingsError`` for what could not be written later, before anything is measured."""
    if png_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--png: needs matplotlib: run `pip install matplotlib`, or use --html")
    for name, file in (("--json", json_file), ("--html", html_file), ("--png", png_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise SettingsError(f"{name} {file}: there is no such directory")
        if file is not None and file.is_dir():
            raise SettingsError(f"{name} {file}: is a directory")


@dataclass(frozen=True, kw_only=True)
class Report:
    """All runs of all servers."""

    names: tuple[str, ...]
    runs: tuple[Run, ...]
    conditions: dict[str, Any]

    @property
    def failed(self) -> int:
        return sum(each.failed for run in self.runs for each in run.figures())

    def show(self, console: Console) -> None:
        for run in self.runs:
            head, *rows = _cells(self.names, run)
            table = Table(title=f"{run.mode}; times in ms", title_justify="left")
            for number, name in enumerate(head):
                table.add_column(name, justify="right" if number else "left", overflow="fold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
            for line in (*_differences(self.names, run), *_failures(self.names, run)):
                console.print(Text(line))
            for title, name in _TIMES:
                bars = histogram(run.milliseconds(name), _TEXT_BINS)
                if bars is not None:
                    console.print(Text(_text_bars(f"{run.mode}, {title}", self.names, bars)))

    def write(self, json_file: Path | None, html_file: Path | None, png_file: Path | None) -> None:
        """What was asked for. Raises ``SettingsError`` for a file that cannot be written."""
        try:
            if json_file is not None:
                json_file.write_text(json.dumps(self._plain(), indent=1) + "\n")
            if html_file is not None:
                html_file.write_text(self._html(), encoding="utf-8")
            if png_file is not None:
                self._png(png_file)
        except OSError as error:
            raise SettingsError(f"{error.filename}: cannot be written: {error.strerror}") from error

    def _plain(self) -> dict[str, Any]:
        runs = [
            {
                "mode": run.mode,
                "servers": [
                    {"name": name, **asdict(found), "outcomes": [asdict(o) for o in outcomes]}
                    for name, found, outcomes in zip(
                        self.names, run.figures(), run.outcomes, strict=True
                    )
                ],
                "compared_with_the_first": [asdict(each) for each in run.comparisons()],
            }
            for run in self.runs
        ]
        return {"conditions": self.conditions, "runs": runs}

    def _html(self) -> str:
        console = Console(file=io.StringIO(), record=True, width=_PAGE_WIDTH)
        told = ", ".join(f"{key}: {value}" for key, value in self.conditions.items())
        console.print(Text(told))
        self.show(console)
        return console.export_html(code_format=_PAGE)

    def _png(self, file: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(len(self.runs), 2, squeeze=False, figsize=(11, 3.5))
        figure.set_figheight(3.5 * len(self.runs))
        for run, row in zip(self.runs, axes, strict=True):
            for (title, name), axis in zip(_TIMES, row, strict=True):
                axis.hist(run.milliseconds(name), bins=20, label=self.names)
                axis.set(title=f"{run.mode}, {title}", xlabel="ms", ylabel="requests")
                axis.legend(fontsize="x-small")
        figure.tight_layout()
        figure.savefig(file, format="png")
        pyplot.close(figure)


def _cells(names: Sequence[str], run: Run) -> list[list[str]]:
    """A line per figure, the first of them names; a column per server."""
    labels = ["server", "requests", "failed", "tokens/s", "requests/s", "tokens/s of one answer"]
    labels += [f"{title} {part}" for title, _ in _TIMES for part in ("p50", "p90", "p99")]
    columns = [labels]
    for name, found in zip(names, run.figures(), strict=True):
        rates = (found.tokens_per_s, found.requests_per_s, found.stream_tokens_per_s)
        times = [
            None if all_ms is None else all_ms[part]
            for all_ms in (found.ttft_ms, found.whole_ms)
            for part in ("p50", "p90", "p99")
        ]
        numbers = [_number(value) for value in (*rates, *times)]
        columns.append([name, str(found.requests), str(found.failed), *numbers])
    return [list(row) for row in zip(*columns, strict=True)]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _differences(names: Sequence[str], run: Run) -> list[str]:
    lines = []
    first = run.figures()[0]
    others = zip(names[1:], run.figures()[1:], run.comparisons(), strict=True)
    for name, found, compared in others:
        parts = []
        if first.tokens_per_s and found.tokens_per_s:
            parts.append(f"{found.tokens_per_s / first.tokens_per_s:.2f}x the tokens/s")
        if compared.ttft_ratio is not None:
            parts.append(f"{compared.ttft_ratio:.2f}x the time to the first token")
        if compared.whole_ratio is not None:
            parts.append(f"{compared.whole_ratio:.2f}x the time of whole answers")
        told = ", ".join(parts) or "nothing to compare"
        lines.append(f"{name}, beside the first, {compared.pairs} pairs: {told}")
    return lines


def _failures(names: Sequence[str], run: Run) -> list[str]:
    return [
        f"{name}: {count} x {problem}"
        for name, found in zip(names, run.figures(), strict=True)
        for problem, count in found.problems.items()
    ]


def _text_bars(title: str, names: Sequence[str], bars: Histogram) -> str:
    lines = []
    for name, counts in zip(names, bars.counts, strict=True):
        lines.append(f"\n{title}: {name}" if len(names) > 1 else f"\n{title}")
        most = max(max(counts), 1)
        for begin, count in zip(bars.edges, counts, strict=False):
            filled = "█" * round(_BAR * count / most)
            lines.append(f"{begin:>12,.1f} ms {filled or ('▏' if count else '')} {count or ''}")
    return "\n".join(lines)
