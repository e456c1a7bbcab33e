"""Find a tritonserver, then check that this machine can run it.

Each check passes silently, or raises ``SetupError`` with one line that says what to do. The limits
were measured with Triton 24.10. Only ``check_open_files`` changes anything: this process's limit.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from trtllm_bls.errors import SetupError
from trtllm_bls.operate.health import SHARED_MEMORY, free_shared_memory
from trtllm_bls.settings.command_options import raise_open_files

PYTHON = "{}.{}".format(*sys.version_info[:2])
LIBPYTHON = f"libpython{PYTHON}.so.1.0"
CONTAINER_ROOT = Path("/opt/tritonserver")
PACKAGE = Path(__file__).resolve().parents[1]
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class Installation:
    """An installed tritonserver: ``root`` holds ``bin/tritonserver`` and ``backends/``."""

    root: Path

    @property
    def binary(self) -> Path:
        return self.root / "bin" / "tritonserver"

    @property
    def backends(self) -> Path:
        return self.root / "backends"

    def stub(self, python: str) -> Path:
        """Return the Python backend's stub for a version such as ``"3.11"``.

        The wheel keeps one per version beside the backends; a container has a single one, in
        the backend itself, whose version only its libraries tell.
        """
        stubs = self.root / "python_backend_stubs"
        if stubs.is_dir():
            return stubs / python / _STUB
        return self.backends / "python" / _STUB

    def version(self) -> tuple[int, ...] | None:
        """Return the server's version where a file has it (containers), else ``None``."""
        file = self.root / "TRITON_VERSION"
        if not file.is_file():
            return None
        digits = file.read_text().strip().split("-")[0].split(".")
        return tuple(int(part) for part in digits if part.isdecimal())


def find_server(explicit: Path | None, container: Path = CONTAINER_ROOT) -> Installation:
    """Find the explicit server, else the container's, else that of the nvidia-pytriton wheel.

    ``explicit`` is the installation's directory or its ``bin/tritonserver``. Raises
    ``SetupError`` naming every path that was tried.
    """
    places = [explicit or container]
    wheel = importlib.util.find_spec("pytriton")  # without importing it
    if explicit is None and wheel is not None and wheel.origin is not None:
        places.append(Path(wheel.origin).parent / "tritonserver")
    for place in places:
        # A circle of links makes ``Path.resolve`` raise before Python 3.13.
        path = Path(os.path.realpath(place.expanduser()))
        if path.is_file():
            path = path.parents[1]
        server = Installation(path)
        if server.binary.is_file() and server.backends.is_dir():
            return server
    if explicit is not None:
        raise SetupError(
            f"--server {explicit}: no tritonserver there; "
            "name its directory (holding bin/ and backends/) or bin/tritonserver itself"
        )
    raise SetupError(
        f"no tritonserver: none in {container} and the wheel is not installed; "
        "run `pip install 'trtllm-bls[server]'` or name one with --server"
    )


# Each model instance has a region of 1 MiB that grows with the largest request in flight. When it
# cannot grow, requests fail with errors that hide the cause. Logits take tens of megabytes.
MIN_SHARED_MEMORY = 32 * 2**20
AMPLE_SHARED_MEMORY = 256 * 2**20

# File descriptors. An idle server with our five models needs half of OPEN_FILES; each stream needs
# a connection to the server and one inside it.
OPEN_FILES = 256
OPEN_FILES_PER_STREAM = 2

# The Python backend's stub understands numpy 2's array layout from 24.12 on (server 2.53).
NUMPY_2_SERVER = (2, 53)


def check_platform(system: str | None = None) -> None:
    """Raise ``SetupError`` where this is not Linux, for which the server's binaries are."""
    system = system or platform.system()
    if system != "Linux":
        raise SetupError(
            f"tritonserver runs on Linux, this is {system}: use a Linux machine or a container"
        )


def check_environment(*paths: str | Path) -> None:
    """Refuse paths that are not ASCII: the Python inside the server cannot import from them."""
    for path in map(str, paths):
        if not path.isascii():
            raise SetupError(
                f"{path}: the server's models cannot run from a path with such letters; "
                "install trtllm-bls into an environment whose path is plain ASCII"
            )


@functools.cache
def embedded_numpy() -> str | None:
    """Return the version of numpy that models will import; ``None`` without one.

    Models run this interpreter isolated: neither PYTHONPATH nor the user's site-packages count. The
    answer is that of the first call, which starts a process.
    """
    program = "import importlib.metadata as m; print(m.version('numpy'))"
    command = [sys.executable, "-I", "-c", program]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    return probe.stdout.strip() or None


def check_numpy(server: Installation, version: str | None) -> None:
    """Raise ``SetupError`` for a numpy with which models do not work.

    Stubs before 24.12 die on their first string input under numpy 2.
    """
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
    minimum: int = MIN_SHARED_MEMORY,
    ample: int = AMPLE_SHARED_MEMORY,
) -> str | None:
    """Check the memory in which models and server exchange tensors.

    A container's default can be too small. Returns a warning if large answers may fill
    ``directory``, ``None`` if there is enough. Raises ``SetupError`` below ``minimum`` bytes.
    """
    free = free_shared_memory(directory) or 0
    state = f"{directory} has {free // 2**20} MiB free"
    remedy = "start the container with --shm-size=1g, or delete what other servers left there"
    if free < minimum:
        raise SetupError(f"{state}, at least {minimum // 2**20} are needed: {remedy}")
    if free >= ample:
        return None
    problem = "requests with logits, long prompts or many streams may fill it and then fail"
    return f"{state}: {problem}; {remedy}"


def check_open_files(max_streams: int) -> None:
    """Raise this process's limit of open files, which the server inherits, or ``SetupError``."""
    needed = OPEN_FILES + OPEN_FILES_PER_STREAM * max_streams
    raise_open_files(needed, f"lower --max-streams, which is {max_streams}")


def libpython(directories: Iterable[Path] | None = None) -> Path:
    """Find this interpreter as a shared library, which the server's models embed.

    Another build of the same version is not good enough: standard modules such as ssl then fail
    to load inside the server. Raises ``SetupError`` if the interpreter was built without it, or if
    that part is not installed.
    """
    if directories is None:
        configured = sysconfig.get_config_var("LIBDIR")
        directories = [Path(configured or sys.base_prefix), Path(sys.base_prefix, "lib")]
    for directory in directories:
        if (library := directory / LIBPYTHON).is_file():
            return library
    raise SetupError(
        f"{LIBPYTHON} of {sys.executable} is missing, and the server's models embed it: "
        f"install it (Debian, Ubuntu: apt install libpython{PYTHON}) or choose an interpreter "
        "built with --enable-shared (make clean, then make demo PYTHON=...)"
    )


def check_server(server: Installation, environment: dict[str, str]) -> None:
    """Raise ``SetupError`` without a stub for this Python, or without a library of the server's."""
    stub = server.stub(PYTHON)
    if not stub.is_file():
        versions = [directory.name for directory in server.root.glob("python_backend_stubs/*")]
        versions.sort(key=Version)
        raise SetupError(
            f"this server has no Python backend for Python {PYTHON}; install trtllm-bls with the "
            f"Python of its container: {' or '.join(versions) or 'it is another'}"
        )
    for binary in (stub, server.binary):
        check_libraries(binary, loaded_libraries(binary, environment))


def check_libraries(binary: Path, libraries: Mapping[str, str]) -> None:
    """Raise ``SetupError`` for a missing library, or a stub's libpython of another version."""
    for name in libraries:
        library = re.match(r"libpython(3\.\d+)\.so", name)
        if library and library[1] != PYTHON:
            raise SetupError(
                f"this server's models run on Python {library[1]}, this is {PYTHON}: "
                f"install and start trtllm-bls with python{library[1]}"
            )
    missing = sorted(name for name, path in libraries.items() if path == "not found")
    if missing:
        raise SetupError(
            f"{binary.name} cannot start, libraries are missing: {', '.join(missing)}; "
            "install them or add their directory to LD_LIBRARY_PATH"
        )


def loaded_libraries(binary: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the paths of the libraries that the loader would load for a program, by name.

    Like ``ldd``, this does not run the program; a missing library has the path ``"not found"``.
    """
    environment = {**environment, "LD_TRACE_LOADED_OBJECTS": "1"}
    try:
        trace = subprocess.run([binary], env=environment, capture_output=True, text=True)
    except OSError as error:
        raise SetupError(f"{binary}: {error.strerror}; install the server again") from error
    paths = {}
    for line in trace.stdout.splitlines():
        name, arrow, path = line.partition(" => ")
        if arrow:
            paths[name.strip()] = path.rsplit(" (", 1)[0].strip()
    return paths
