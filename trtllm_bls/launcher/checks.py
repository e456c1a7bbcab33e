"""Is this machine fit to serve? Each check passes silently or raises one line that says what to do.

Owns the rules (measured against Triton 24.10) and nothing that changes the machine.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from trtllm_bls.errors import SetupError
from trtllm_bls.health.processes import SHARED_MEMORY, free_shared_memory
from trtllm_bls.launcher import interpreter
from trtllm_bls.launcher.interpreter import PYTHON

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


# One region per model instance, 1 MiB at first, growing with the largest request in flight; when
# it cannot grow, requests fail in ways that do not name the cause. Logits are tens of megabytes.
LEAST_SHARED_MEMORY = 32 * 2**20
AMPLE_SHARED_MEMORY = 256 * 2**20

# File descriptors: of an idle server with our five models, doubled, and of a stream's connections
# to and within it. Idle connections and bursts are room beyond that.
OPEN_FILES, OPEN_FILES_PER_STREAM = 256, 2
AMPLE_OPEN_FILES = 65536

# The Python backend's stub understands numpy 2's array layout from 24.12 on (server 2.53).
NUMPY_2_SERVER = (2, 53)


def check_platform(system: str | None = None) -> None:
    """The server's binaries are for Linux."""
    system = system or platform.system()
    if system != "Linux":
        raise SetupError(
            f"tritonserver runs on Linux, this is {system}: use a Linux machine or a container"
        )


def check_environment(*places: str | Path) -> None:
    """The Python inside the server cannot read packages from paths beyond ASCII."""
    for place in map(str, places):
        if not place.isascii():
            raise SetupError(
                f"{place}: the server's models cannot run from a path with such letters; "
                "install trtllm-bls into an environment whose path is plain ASCII"
            )


def embedded_numpy() -> str | None:
    """The numpy that models will import: that of this interpreter without PYTHONPATH or user site.

    ``None`` if there is none.
    """
    probe = subprocess.run(
        [sys.executable, "-I", "-c", "import importlib.metadata as m; print(m.version('numpy'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    return probe.stdout.strip() or None


def check_numpy(server: Installation, version: str | None) -> None:
    """Models need numpy; stubs before 24.12 die on their first string input under numpy 2."""
    if version is None:
        raise SetupError(
            f"the environment of {sys.executable} has no numpy, so the server's models cannot "
            "start: install trtllm-bls into a virtual environment and run it from there"
        )
    if int(version.split(".")[0]) < 2 or (server.version() or (0,)) >= NUMPY_2_SERVER:
        return
    raise SetupError(
        f"numpy {version} crashes this server's Python backend: run `pip install 'numpy<2'`"
    )


def check_shared_memory(
    directory: Path = SHARED_MEMORY,
    least: int = LEAST_SHARED_MEMORY,
    ample: int = AMPLE_SHARED_MEMORY,
) -> str | None:
    """Models and server exchange tensors there; a container's default can be too small.

    Returns a warning where large answers may fill it, ``None`` where there is enough.
    """
    free = free_shared_memory(directory) or 0
    mend = "start the container with --shm-size=1g, or delete what other servers left there"
    if free < least:
        raise SetupError(
            f"{directory} has {free // 2**20} MiB free, "
            f"at least {least // 2**20} are needed: {mend}"
        )
    if free < ample:
        return (
            f"{directory} has {free // 2**20} MiB free: requests with logits, long prompts or many "
            f"streams may fill it and then fail; {mend}"
        )
    return None


def check_open_files(max_streams: int) -> None:
    """Every stream is a connection; raises this process's limit, which the server inherits.

    Raises ``SetupError`` where the hard limit is too low. A server that runs out of file
    descriptors answers nobody, and fills its log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + OPEN_FILES_PER_STREAM * max_streams
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SetupError(
            f"only {hard} files may be open (ulimit -Hn), --max-streams {max_streams} needs "
            f"{needed}: allow more (docker run --ulimit nofile={needed}) or lower --max-streams"
        )
    wanted = AMPLE_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, AMPLE_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def libpython(directories: Iterable[Path] | None = None) -> Path:
    """The shared library of the interpreter that runs us."""
    found = interpreter.find_libpython(directories)
    if found is None:
        raise SetupError(interpreter.no_libpython())
    return found


def check_server(server: Installation, environment: dict[str, str]) -> None:
    """There is a stub for this Python, and all libraries of stub and server can be found."""
    stub = server.stub(PYTHON)
    if not stub.is_file():
        found = server.root.glob("python_backend_stubs/*")
        stubs = sorted((each.name for each in found), key=Version)
        raise SetupError(
            f"this server has no Python backend for Python {PYTHON}: "
            f"use one of {', '.join(stubs) or 'another server'}"
        )
    check_libraries(stub, loaded_libraries(stub, environment))
    check_libraries(server.binary, loaded_libraries(server.binary, environment))


def check_libraries(binary: Path, libraries: Mapping[str, str]) -> None:
    """Every library was found, and a stub's libpython is of the version that runs us."""
    for name in libraries:
        wanted = re.match(r"libpython(3\.\d+)\.so", name)
        if wanted and wanted[1] != PYTHON:
            raise SetupError(
                f"this server's models run on Python {wanted[1]}, this is {PYTHON}: "
                f"install and start trtllm-bls with python{wanted[1]}"
            )
    missing = sorted(name for name, place in libraries.items() if place == "not found")
    if missing:
        raise SetupError(
            f"{binary.name} cannot start, libraries are missing: {', '.join(missing)}; "
            "install them or add their directory to LD_LIBRARY_PATH"
        )


def loaded_libraries(binary: Path, environment: dict[str, str]) -> dict[str, str]:
    """What the dynamic loader would load for a program, by name; it is not run.

    The same question as ``ldd`` asks; a missing library's place is ``"not found"``.
    """
    trace = subprocess.run(
        [binary],
        env=environment | {"LD_TRACE_LOADED_OBJECTS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    pairs = (line.split(" => ", 1) for line in trace.stdout.splitlines() if " => " in line)
    return {name.strip(): place.rsplit(" (", 1)[0].strip() for name, place in pairs}
