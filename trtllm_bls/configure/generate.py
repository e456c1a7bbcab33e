"""What is generated from declarations in the source tree; ``make generate`` writes it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from trtllm_bls.configure.pbtxt import PARAMETERS, config_text
from trtllm_bls.contract import MODELS
from trtllm_bls.parameters import parameters_in, parameters_of
from trtllm_bls.parameters.declaration import Parameter
from trtllm_bls.parameters.models import EngineFacts

_INTRODUCTION = """\
# Parameters

For people who look up what a model can be told at load. `make generate` writes this page from
`trtllm_bls/parameters/models.py`; do not edit it.

A parameter stands in its model's `config.pbtxt`. There are three ways to set it. The first that
applies wins:

1. `trtllm-bls serve --set MODEL.KEY=VALUE`, for one server
2. the environment variable in the column "variable"; `serve` sets some from its own options
3. the value in `config.pbtxt`, which `trtllm-bls configure --set MODEL.KEY=VALUE` writes
"""
_FACTS_INTRODUCTION = """\
## What an engine tells

`trtllm-bls configure` writes these into the `tensorrt_llm` of the C++ backend, from the engine's
own `config.json`. The backend does not read them; `tensorrt_llm_bls` does.
"""


def generated() -> dict[str, str]:
    """The text of every generated file, by its path."""
    files = {f"models/{m.name}/config.pbtxt": config_text(m, PARAMETERS[m.name]) for m in MODELS}
    return files | {"docs/parameters.md": _parameters_page()}


def _parameters_page() -> str:
    parts = [_INTRODUCTION]
    for model in ("tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing"):
        about = " (the embedded engine)" if model == "tensorrt_llm" else ""
        parts.append(f"## `{model}`{about}\n\n{_parameters_table(parameters_of(model))}")
    parts.append(f"{_FACTS_INTRODUCTION}\n{_parameters_table(parameters_in(EngineFacts))}")
    return "\n".join(parts)


def _parameters_table(parameters: Mapping[str, Parameter]) -> str:
    def code(text: str) -> str:
        return f"`{text}`" if text else ""

    rows = (
        (code(key), each.kind.expected, code(each.in_file), code(each.env), each.help)
        for key, each in parameters.items()
    )
    lines = (("key", "value", "as shipped", "variable", "meaning"), ("---",) * 5, *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(root: Path) -> list[str]:
    """Write what is stale below ``root``; the paths of these files."""
    stale = []
    for path, text in generated().items():
        file = root / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            stale.append(path)
    return stale


if __name__ == "__main__":
    for written in main(Path.cwd()):
        sys.stdout.write(f"wrote {written}\n")
