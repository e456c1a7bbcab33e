"""Status and drain files, by which the processes of one server know of each other.

All files are in one directory; this module owns their names and form. Each process of
``tensorrt_llm_bls``, and of the OpenAI API beside it, writes ``<pid>-<start>.json``: whether its
threads run, how much it has sent, which requests run. The name has the process's start, because
Linux uses a process id again. To stop the server, ``serve`` makes the file
``drain``. Its modification time is the deadline for the running requests, in seconds of
``time.monotonic()``, which all processes of a machine share. A process that refuses new requests,
and has sent to the engine all that its running requests need, has *handed over*. Triton may stop
once all processes have.

A drain works on a full disk. ``drain`` is made beforehand under another name and only renamed. A
process that cannot write its status shows by the mode of the file that it has handed over.

Files are used since either side may be killed at any moment, and a shell can drain a server too
(``touch drain``). Whoever may write into the directory may drain the server, and no more than that:
no link is followed, and a status counts only if its file belongs to the user that runs the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

DRAIN = "drain"
_LEAVING = "leaving"
_LONGEST_SUFFIX = ".longest"
# ``touch`` sets the time of day, which is above this, while ``time.monotonic()`` stays far below. A
# drain file with a time of day has no deadline.
_NO_DEADLINE = 1e9
_READ_ONLY = 0o400
_WRITABLE = 0o200
_MAX_STATUS_BYTES = 1 << 20

# The environment variable with the id of the requests that ``serve`` itself sends to probe the
# server. They are neither counted nor logged. The id is random, so no caller can hide behind it.
CANARY_ID = "TRTLLM_BLS_CANARY_ID"

# The gauge on Triton's ``/metrics`` that counts an engine's steps, and the label to look for. The
# C++ backend has both in every release.
ENGINE_STEPS = "nv_trt_llm_general_metrics"
STEPS_LABEL = ("general_type", "iteration_counter")
# The gauge there of an engine's requests, and its label: ``scheduled`` ones run, ``active`` ones
# run or wait. Releases from 0.18 on also tell those that are ``waiting``.
ENGINE_REQUESTS = "nv_trt_llm_request_metrics"
REQUESTS_LABEL = "request_type"


@dataclass(frozen=True)
class ProcessStatus:
    """The state of one process; times are seconds of ``time.monotonic()``.

    - ``loop_at``: when its event loop last ran a callback.
    - ``responses``: responses made so far, errors left out.
    - ``running``, ``requests``: the number of running requests, and the ids of the first ones.
    - ``handed_over``: it takes no new requests, and the running ones need no further request to the
      engine.
    - ``missed_turns``: how often the lifecycle thread has run (at most 20 times a second) since the
      event loop last ran. A large number means that the loop alone is stuck; if no thread of the
      process runs, the number does not grow.
    - ``engines``: the problem of each engine elsewhere that tells its state, by the engine's name;
      an empty text without a problem.
    - ``tokens``: tokens taken from the engine so far.
    - ``prompts``, ``waiting``, ``queued``: requests that have not ended, those of them without a
      token, and those of these that the engine has not been given. A request of several prompts
      is one of ``running`` and several here.
    """

    pid: int
    written_at: float
    loop_at: float
    responses: int
    running: int
    requests: tuple[str, ...] = ()
    handed_over: bool = False
    missed_turns: int = 0
    engines: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    prompts: int = 0
    waiting: int = 0
    queued: int = 0


def common_problem(engines: Mapping[str, str]) -> str | None:
    """Return the problem of the first engine if each of ``engines`` has one, else ``None``."""
    if engines and all(engines.values()):
        return next(iter(engines.values()))
    return None


@dataclass(frozen=True)
class ServerMetric:
    """A metric of a server as a whole; docs/metrics.md lists them.

    ``kind``: Prometheus's type. ``labels``: the names of its labels, at most one.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"

    def text(self, values: Mapping[str, float]) -> str:
        """Return the metric in Prometheus' text format; ``values`` by the label's value."""
        lines = [f"# HELP {self.name} {self.meaning}\n# TYPE {self.name} {self.kind}\n"]
        for label_value, value in values.items():
            series = self.name
            for label in self.labels:
                series += f"{{{label}={json.dumps(label_value)}}}"
            lines.append(f"{series} {value}\n")
        return "".join(lines)


ENGINE_UP = ServerMetric(
    "trtllm_bls_engine_up", "1 while the engine takes requests, else 0", ("engine",)
)


def engines_up(engines: Mapping[str, str]) -> str:
    """Return ``ENGINE_UP`` of each engine in Prometheus' text format; ``engines``: of a status."""
    return ENGINE_UP.text({name: int(not problem) for name, problem in engines.items()})


def start_of(pid: int) -> int | None:
    """Return a process's start, in clock ticks since the machine's; ``None`` if it has ended.

    Together with the process id, this names one process for as long as the machine runs.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()  # the name before may be any bytes
    if state in b"ZX":
        return None
    return int(fields[18])


class StatusDirectory:
    """Reads and writes the files, in any process. A file that cannot be read counts as absent."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def write(self, status: ProcessStatus) -> None:
        """Replace the process's file. Raises ``OSError``.

        If the disk is full, the modification time of the old file is still set to ``loop_at``, and
        its mode to ``handed_over``.
        """
        file = self.path / f"{status.pid}-{start_of(status.pid)}.json"
        try:
            self._replace(file, json.dumps(asdict(status)), status.loop_at)
        except OSError:
            with suppress(OSError), _descriptor(file) as old:
                os.utime(old, (status.loop_at, status.loop_at))
                if status.handed_over:
                    os.fchmod(old, _READ_ONLY)
            raise

    def read(self) -> list[ProcessStatus]:
        """Return the status of every process that runs; remove the files of those that ended."""
        statuses = []
        for file in sorted(self.path.glob("*-*.json")):
            pid, _, start = file.stem.partition("-")
            with suppress(OSError, ValueError, TypeError, RecursionError):
                if start_of(int(pid)) != int(start):
                    file.unlink()
                    continue
                with _descriptor(file) as descriptor:
                    state = os.fstat(descriptor)
                    text = os.read(descriptor, _MAX_STATUS_BYTES)
                if state.st_uid != os.stat(f"/proc/{pid}").st_uid:
                    continue
                status = ProcessStatus(**json.loads(text))
                statuses.append(
                    replace(
                        status,
                        pid=int(pid),
                        loop_at=max(status.loop_at, state.st_mtime),
                        requests=tuple(status.requests),
                        handed_over=status.handed_over or not state.st_mode & _WRITABLE,
                    )
                )
        return statuses

    def ask_to_drain(self, deadline: float) -> None:
        """Have every process drain, and end its requests at ``deadline``. Raises ``OSError``."""
        file = self.path / DRAIN
        spare = self.path / f"{DRAIN}.new"
        times = None  # the time of day, which stands for no deadline
        if deadline < _NO_DEADLINE:
            times = (deadline, deadline)
        if os.path.lexists(file):
            os.utime(file, times, follow_symlinks=False)
            return
        if not os.path.lexists(spare):
            self._create(spare)
        os.utime(spare, times, follow_symlinks=False)
        spare.replace(file)

    def give_notice(self) -> None:
        """Have health probes fail while requests are still served. Raises ``OSError``."""
        with suppress(FileExistsError):
            self._create(self.path / _LEAVING)

    @property
    def leaving(self) -> bool:
        """True if nothing new should be sent here: notice was given, or the server drains."""
        return os.path.lexists(self.path / _LEAVING) or os.path.lexists(self.path / DRAIN)

    def drain_deadline(self) -> float | None:
        """Return the deadline of the drain: ``None`` without a drain, infinite without a time."""
        try:
            deadline = (self.path / DRAIN).lstat().st_mtime
        except OSError:
            return None
        return deadline if deadline < _NO_DEADLINE else math.inf

    def clear(self) -> None:
        """Remove the files of an earlier server."""
        for pattern in ("*.json", "*.new", f"*{_LONGEST_SUFFIX}", DRAIN, _LEAVING):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)

    def tell_longest(self, model: str, tokens: int) -> None:
        """Publish the longest sequence, in tokens, that engine ``model`` takes.

        For engines whose configuration does not say so. Raises ``OSError``.
        """
        self._replace(self.path / f"{model}{_LONGEST_SUFFIX}", str(tokens))

    def longest(self, model: str) -> int | None:
        """Return the longest sequence that ``model`` has published, in tokens, if it has."""
        with suppress(OSError, ValueError):
            return int((self.path / f"{model}{_LONGEST_SUFFIX}").read_text(encoding="ascii"))
        return None

    def forget_drain(self) -> None:
        """Remove an earlier server's drain file, and make the one to be renamed.

        Makes the directory if it is missing. Raises ``OSError``.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        spare = f"{DRAIN}.new"
        for name in (DRAIN, _LEAVING, spare):
            (self.path / name).unlink(missing_ok=True)
        self._create(self.path / spare)

    @property
    def handed_over(self) -> bool:
        """True if every process has handed over, and without any process."""
        return all(status.handed_over for status in self.read())

    def _create(self, file: Path, text: str = "") -> None:
        """Make a file of this user's; a link or another file of that name is no place for it."""
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)

    def _replace(self, file: Path, text: str, at: float | None = None) -> None:
        """Write a file that a reader sees whole or not at all; ``at``: its modification time."""
        fresh = file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        self._create(fresh, text)
        if at is not None:
            os.utime(fresh, (at, at), follow_symlinks=False)
        fresh.replace(file)


@contextmanager
def _descriptor(file: Path) -> Iterator[int]:
    """Open a file to read, which is no link, while the context is entered."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
