"""Writes a manual page of each command: `make man`, then `man -l site/man/trtllm-bls-serve.1`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click_man.core import generate_man_page

from trtllm_bls import __version__
from trtllm_bls.cli import main


def write_pages(directory: Path) -> list[Path]:
    """Write the pages into ``directory`` and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    top = click.Context(main, info_name="trtllm-bls")
    for name in main.list_commands(top):
        command = main.get_command(top, name)
        assert command is not None, name
        main.add_command(command, name)
    pages = {"trtllm-bls": top}
    for name, command in main.commands.items():
        pages[f"trtllm-bls-{name}"] = click.Context(command, parent=top, info_name=name)
    paths = []
    for name, context in pages.items():
        path = directory / f"{name}.1"
        path.write_text(generate_man_page(context, version=__version__), encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for page in write_pages(Path(sys.argv[1])):
        print(page)
