"""What others publish and tests download: coding agents, and chat templates of model families."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

TEMPLATES = "@huggingface/ollama-utils@0.0.18"
NUM_TEMPLATES = 97
AGENTS = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197")
AXE = "axe-core@4.14.1"
# The module of templates is TypeScript; without the types, node can read it.
_READ = """
const fs = require('fs')
const folder = 'node_modules/@huggingface/ollama-utils/src/'
const source = fs.readFileSync(folder + 'chat-template-automap.ts', 'utf8')
const script = source.replace(/^import.*$/m, '').replace(/export const (\\w+)[^=]*=/, 'return ')
console.log(JSON.stringify(new Function(script)().map(({model, gguf}) => [model, gguf])))
"""


def pip_install(folder: Path, *words: str) -> Path:
    """Install packages into the environment in ``folder``, which is made; its ``bin``."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *words]
    subprocess.run(pip, check=True, timeout=900)
    return python.parent


def npm_install(folder: Path, *packages: str, scripts: bool = False) -> None:
    """Install packages below ``folder``; the test is skipped where that cannot be done."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: `apt-get install npm` runs it")
    install = ["npm", "install", "--no-audit", "--no-fund", *packages]
    install += [] if scripts else ["--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=280)
    if done.returncode:
        problem = done.stderr.strip()[-200:]
        pytest.skip(f"cannot install {' '.join(packages)}: {problem}; a way to npm runs it")


def templates(folder: Path) -> list[tuple[str, str]]:
    """Names of model families, each with its template."""
    npm_install(folder, TEMPLATES)
    read = subprocess.run(
        ["node", "-e", _READ], cwd=folder, capture_output=True, check=True, timeout=280
    )
    found = [(name, template) for name, template in json.loads(read.stdout)]
    assert len(found) == NUM_TEMPLATES
    return found


def pip_download(folder: Path, *what: str) -> Path:
    """The file of a package of PyPI."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, *what], capture_output=True, text=True, timeout=280)
    if done.returncode:
        problem = done.stderr.strip()[-200:]
        pytest.skip(f"cannot download {what[-1]}: {problem}; a way to PyPI runs it")
    (found,) = folder.iterdir()
    return found


def templates_of_llama_cpp(folder: Path) -> dict[str, str]:
    """Chat templates by names of models; they come with the sources of ``llama-cpp-python``."""
    package = "llama-cpp-python"
    sources = pip_download(folder, "--no-binary", package, f"{package}==0.3.36")
    found = {}
    with tarfile.open(sources) as archive:
        for each in archive:
            if "/models/templates/" in each.name and each.isfile():
                file = archive.extractfile(each)
                assert file is not None
                found[Path(each.name).stem] = file.read().decode()
    return found
