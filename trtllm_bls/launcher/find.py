"""Finding a tritonserver on this machine.

Owns the order of the search and the layout of an installation. Starts nothing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from trtllm_bls.errors import SetupError

CONTAINER_ROOT = Path("/opt/tritonserver")
PACKAGE = Path(__file__).resolve().parents[1]
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """One tritonserver: ``root`` holds ``bin/tritonserver`` and ``backends/``."""

    root: Path

    @property
    def binary(self) -> Path:
        return self.root / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        return self.root / "backends"

    def stub(self, python: str) -> Path:
        """The Python backend's stub for a version such as ``"3.11"``.

        The wheel keeps one per version beside the backends; a container has a single one, in
        the backend itself, whose version only its libraries tell.
        """
        own = self.root / "python_backend_stubs"
        return own / python / _STUB if own.is_dir() else self.backends / "python" / _STUB

    def version(self) -> tuple[int, ...] | None:
        """The server's version where a file tells it (containers), else ``None``."""
        file = self.root / "TRITON_VERSION"
        if not file.is_file():
            return None
        digits = file.read_text().strip().split("-")[0].split(".")
        return tuple(int(part) for part in digits if part.isdigit())


def find_server(explicit: Path | None, container: Path = CONTAINER_ROOT) -> Installation:
    """The explicit server, else the container's, else the wheel's.

    ``explicit`` is the installation's directory or its ``bin/tritonserver``. Raises
    ``SetupError`` naming every place that was looked at.
    """
    for place in (container, _wheel_root()) if explicit is None else (explicit,):
        if place is not None and (found := _installation_of(place)):
            return found
    if explicit is not None:
        raise SetupError(
            f"--server {explicit}: no tritonserver there; "
            "name its directory (holding bin/ and backends/) or bin/tritonserver itself"
        )
    raise SetupError(
        f"no tritonserver: none in {container} and the wheel is not installed; "
        "run `pip install 'trtllm-bls[server]'` or name one with --server"
    )


def _installation_of(place: Path) -> Installation | None:
    place = place.expanduser()
    root = place.resolve().parents[1] if place.is_file() else place.resolve()
    found = Installation(root)
    return found if found.binary.is_file() and found.backends.is_dir() else None


def _wheel_root() -> Path | None:
    """Where the nvidia-pytriton wheel put its server; the wheel is not imported for it."""
    wheel = importlib.util.find_spec("pytriton")
    if wheel is None or wheel.origin is None:
        return None
    return Path(wheel.origin).parent / "tritonserver"
