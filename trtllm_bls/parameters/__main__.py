"""Prints ``docs/parameters.md``, made of the table."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from trtllm_bls.parameters.kinds import Parameter
from trtllm_bls.parameters.table import ENGINE_FACTS, rows_of

_INTRODUCTION = """\
# Parameters

Written by `python -m trtllm_bls.parameters > docs/parameters.md`; do not edit.

A parameter stands in its model's `config.pbtxt`. `trtllm-bls serve --set MODEL.KEY=VALUE` replaces
it for one server, `trtllm-bls configure --set MODEL.KEY=VALUE` in the repository that is written.
A variable, where one is named, comes before the file, but not before `serve --set`: `serve` sets it
from its own options.
"""
_FACTS_INTRODUCTION = """\
`trtllm-bls configure` writes these into the `tensorrt_llm` of the C++ backend, from the engine's
own `config.json`. The backend does not read them; the orchestrator does.
"""


def as_markdown() -> str:
    """The text of ``docs/parameters.md``."""
    parts = [_INTRODUCTION]
    for model in ("tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing"):
        about = " (the embedded engine)" if model == "tensorrt_llm" else ""
        parts.append(f"## `{model}`{about}\n\n{_markdown_table(rows_of(model).values())}")
    parts.append(
        f"## What an engine tells\n\n{_FACTS_INTRODUCTION}\n{_markdown_table(ENGINE_FACTS)}"
    )
    return "\n".join(parts)


def _markdown_table(rows: Iterable[Parameter]) -> str:
    lines = ["| key | value | as shipped | variable | meaning |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        shipped, env = (f"`{text}`" if text else "" for text in (row.in_file, row.env))
        lines.append(f"| `{row.key}` | {row.kind.expected} | {shipped} | {env} | {row.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
