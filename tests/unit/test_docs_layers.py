"""docs/architecture.md tells the layers that ``lint-imports`` checks, and all actions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import get_args

from trtllm_bls.speculative.rounds import Action

ROOT = Path(__file__).parents[2]


def layers_of_setup() -> list[set[str]]:
    """The modules of each layer, the highest first, as import-linter reads them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["importlinter:contract:layers"]["layers"].split("\n")
    return [set(re.findall(r"\w+", line)) for line in lines if line.strip()]


def layers_of_page() -> list[set[str]]:
    """The module names in the first column of the table under "Layers"."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("\n## Layers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.M)
    return [set(re.findall(r"`(\w+)`", row)) for row in rows]


def test_the_page_has_the_layers_of_the_import_linter() -> None:
    """A reader who trusts the table finds no import that it forbids."""
    assert len(layers_of_page()) > 10
    assert layers_of_page() == layers_of_setup()


def test_the_page_has_every_action_of_a_speculative_request() -> None:
    """In the table of what ``SpeculativeRun`` does."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| action | what")[2].partition("\n\n")[0]
    told = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert sorted(told) == sorted(action.__name__ for action in get_args(Action))


def test_the_drawings_name_files_that_exist() -> None:
    """A reader goes from a box of the drawing to its code."""
    package = ROOT / "trtllm_bls"
    for drawing in (ROOT / "docs" / "drawings").glob("*.dot"):
        named = re.findall(r"(?:\\n|\s)(\w+/\w+\.py)", drawing.read_text(encoding="utf-8"))
        assert all((package / name).is_file() for name in named), (drawing.name, named)
        assert (len(named) > 5) is (drawing.stem == "request")
