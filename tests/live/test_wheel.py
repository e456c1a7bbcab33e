"""The wheel in an environment of its own, outside any checkout: what it brings is enough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from trtllm_bls.cli import main
from trtllm_bls.operate.serve import PROMPTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("trtllm_bls", "models", "assets", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(words: Sequence[str | Path], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trtllm-bls`` of an environment with our wheel; everything else comes from this one's."""
    directory = tmp_path_factory.mktemp("wheel")
    sources = directory / "sources"  # a build leaves files beside what it reads
    sources.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, sources / name, symlinks=True)
        else:
            shutil.copy(source, sources / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--quiet"]
    built = run([*pip, "wheel", *offline, "--no-build-isolation", "-w", directory, "."], sources)
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "venv", with_pip=False)
    (site,) = (directory / "venv" / "lib").glob("*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join(shared))
    python = directory / "venv" / "bin" / "python"
    put = run([*pip, "--python", python, "install", *offline, wheel], directory)
    assert put.returncode == 0, put.stderr
    return python.with_name("trtllm-bls")


@pytest.mark.slow
def test_the_wheel_brings_repository_and_demo(installed: Path) -> None:
    """The demo answers its three prompts with nothing but what was installed."""
    shown = run([installed, "demo", "--max-tokens", "8", "--threads", "1"], installed.parent)
    assert shown.returncode == 0, shown.stderr
    for prompt in PROMPTS:
        assert prompt in shown.stdout
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize("name", main.list_commands(click.Context(main)))
def test_every_command_is_there(installed: Path, name: str) -> None:
    """Their code is in the package, not in the checkout's programs."""
    shown = run([installed, name, "--help"], installed.parent)
    assert shown.returncode == 0, shown.stderr
    assert f"trtllm-bls {name}" in shown.stdout
