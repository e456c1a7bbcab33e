"""The version of this installation, as `--version`, the start line and reports print it."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from trtllm_bls import __version__

_CHECKOUT = Path(__file__).resolve().parents[2]


def version_text() -> str:
    """Return the version and, where the installation knows it, the commit.

    A checkout knows its commit from git, and an installation by pip from a repository's address
    keeps it in ``direct_url.json``.
    """
    commit = _installed_commit() or _checkout_commit()
    if not commit:
        return __version__
    return f"{__version__} (commit {commit[:12]})"


def _installed_commit() -> str:
    try:
        direct_url = distribution("trtllm-bls").read_text("direct_url.json") or "{}"
        commit = json.loads(direct_url).get("vcs_info", {}).get("commit_id", "")
    except (PackageNotFoundError, ValueError):
        return ""
    return str(commit)


def _checkout_commit() -> str:
    if not (_CHECKOUT / ".git").exists():
        return ""
    command = ["git", "-C", str(_CHECKOUT), "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return git.stdout.strip()
    return ""
