"""Commands in the pages exist, with the options and arguments that are given to them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
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
    ROOT / "examples" / "README.md",
]
COMMAND = re.compile(r"\btrtllm-bls ([a-z]+)\b([^`\n#|]*)")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
BLOCK = re.compile(r"^( *)```.*?\n(.*?)^\1```", re.M | re.S)
LINE = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?trtllm-bls ([^\n]*)", re.M)
MAKE = re.compile(r"^(?:\$ )?make ([a-z][a-z-]*)|`make ([a-z][a-z-]*)", re.M)


def text_of(page: Path) -> str:
    """With each continued line in one."""
    return re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Each command of ours that a page spells, and its options."""
    for name, words in COMMAND.findall(text_of(page)):
        for option in OPTION.findall(words):
            yield name, option


def lines(page: Path) -> list[list[str]]:
    """The words of each line of ours in the page's blocks of code, up to a pipe or a ``&``."""
    found = []
    for _, block in BLOCK.findall(text_of(page)):
        for line in LINE.findall(block):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            ends = [words.index(word) for word in ("|", "&", "&&", ";", ">", "<") if word in words]
            words = words[: min(ends, default=len(words))]
            goes_on = words[-1:] == ["…"] and not words[-2].startswith("-")
            found.append(words[:-1] if goes_on else words)
    return found


def options_of(name: str) -> set[str]:
    """The options of a command; none for a word that is no command."""
    command = main.get_command(click.Context(main), name)
    return {word for each in command.params for word in each.opts} if command else set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_pages_exist(page: Path) -> None:
    """A reader can copy every command."""
    asked = {(name, option) for name, option in commands(page) if option != "--help"}
    assert sorted((name, option) for name, option in asked if option not in options_of(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_the_pages_are_read_by_the_command_line(page: Path) -> None:
    """Each command, its options with their values, and its arguments."""
    for name, *words in lines(page):
        if name.startswith("-"):
            continue
        command = main.get_command(click.Context(main), name)
        assert command is not None, f"trtllm-bls {name}"
        context = click.Context(command, info_name=name)
        values, rest, _ = command.make_parser(context).parse_args(list(words))
        assert not rest, (name, words)
        for option in command.params:
            if isinstance(option.type, click.Choice) and option.name in values:
                option.type_cast_value(context, values[option.name])


def test_the_pages_do_name_commands() -> None:
    """Otherwise the tests above would see nothing."""
    assert len({name for page in PAGES for name, _ in commands(page)}) > 6
    assert sum(len(lines(page)) for page in PAGES) > 40


def test_targets_of_make_in_the_pages_exist() -> None:
    """Those of the Makefile in the root."""
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {first or second for page in PAGES for first, second in MAKE.findall(page.read_text())}
    assert asked
    assert asked <= made


# What the embedded engine and the server bring, as if they were not installed.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "safetensors", "llguidance", "pytriton")))
"""


@pytest.mark.slow
def test_the_tests_that_need_no_torch_load_without_it(tmp_path: Path) -> None:
    """Those of the line in CONTRIBUTING.md, in a process that cannot import it."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"`\.venv/bin/pytest ([^`]*)` needs neither a server nor torch", page)
    assert found
    (tmp_path / "without_torch.py").write_text(WITHOUT)
    options = ("-p", "without_torch", "--collect-only", "-qq", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *found[1].split()],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
