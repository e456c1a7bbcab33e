"""trtllm-bls: the layer between users and TensorRT-LLM on Triton."""

# The one place of the number; setup.cfg reads it here. docs/stability.md says when it is raised.
__version__ = "0.3.0"


def version_text() -> str:
    """The version and, where the installation knows it, the commit: that of a checkout, or the one
    that pip installed from a repository."""
    import json
    import subprocess
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    commit, checkout = "", Path(__file__).resolve().parents[1]
    with suppress(PackageNotFoundError, ValueError):
        direct = distribution("trtllm-bls").read_text("direct_url.json") or "{}"
        commit = json.loads(direct).get("vcs_info", {}).get("commit_id", "")
    if not commit and (checkout / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
            told = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
            commit = told.stdout.strip()
    return f"{__version__} (commit {commit[:12]})" if commit else __version__
