"""Commands in the pages exist, with the options that are given to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from trtllm_bls.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests" / "conformance" / "README.md",
]
COMMAND = re.compile(r"\btrtllm-bls ([a-z]+)\b([^`\n#|]*)")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
MAKE = re.compile(r"^(?:\$ )?make ([a-z][a-z-]*)|`make ([a-z][a-z-]*)", re.M)


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Each command of ours that a page spells, and its options."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    for name, words in COMMAND.findall(text):
        for option in OPTION.findall(words):
            yield name, option


def options_of(name: str) -> set[str]:
    """The options of a command; none for a word that is no command."""
    command = main.get_command(click.Context(main), name)
    return {word for each in command.params for word in each.opts} if command else set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_pages_exist(page: Path) -> None:
    """A reader can copy every command."""
    asked = {(name, option) for name, option in commands(page) if option != "--help"}
    assert sorted((name, option) for name, option in asked if option not in options_of(name)) == []


def test_the_pages_do_name_commands() -> None:
    """Otherwise the test above would see nothing."""
    assert len({name for page in PAGES for name, _ in commands(page)}) > 6


def test_targets_of_make_in_the_pages_exist() -> None:
    """Those of the Makefile in the root."""
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {first or second for page in PAGES for first, second in MAKE.findall(page.read_text())}
    assert asked
    assert asked <= made
