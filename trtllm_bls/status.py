"""What the processes of one server tell each other, through files in one directory.

Every process of ``tensorrt_llm_bls``, and of the OpenAI API beside it, keeps ``<pid>.json`` there:
that its threads run, what it has sent, which requests run. Whoever is about to stop the server
makes ``drain``, whose time of change is the last moment for requests, in seconds of
``time.monotonic()``, which all processes of a machine share. A process that has sent all its
requests to the engine, and takes no more, says so: then Triton may stop.

A drain needs no room on the disk: its file is made beforehand and only renamed, and a status that
cannot be written says by its mode that the process has handed over.

Files, because either side may be killed at any moment, and because a shell can do the same
(``touch drain``). Owns their names and form.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

DRAIN = "drain"
_LONGEST = ".longest"
_NO_DEADLINE = 1e9  # more is what ``touch`` leaves: the time of day, not of a machine that runs
_CANNOT_BE_WRITTEN, _WRITABLE = 0o400, 0o200

# Names the variable with the id of ``serve``'s own requests, which are neither counted nor logged.
# Nobody else can guess it, so that no caller hides.
CANARY_ID = "TRTLLM_BLS_CANARY_ID"

# The gauge, on Triton's ``/metrics``, of how many steps an engine has made, with its label. The C++
# backend has it in every release.
ENGINE_STEPS, STEPS_LABEL = "nv_trt_llm_general_metrics", ("general_type", "iteration_counter")


@dataclass(frozen=True)
class ProcessStatus:
    """One process; times are seconds of ``time.monotonic()``.

    ``loop_at``: when its event loop last turned. ``responses``: made so far, errors left out;
    ``tokens``: taken from the engine so far.
    ``requests``: the ids of some that run, of ``running``. ``handed_over``: it takes no new
    requests, and needs no further request to the engine for those that run. ``missed_turns``: how
    often another thread of the process has had its turn, 20 times a second at most, since its
    event loop has. ``engine_problem``: what an engine in another process says is wrong with it.
    """

    pid: int
    written_at: float
    loop_at: float
    responses: int
    running: int
    requests: tuple[str, ...] = ()
    handed_over: bool = False
    missed_turns: int = 0
    engine_problem: str | None = None
    tokens: int = 0


class StatusDirectory:
    """The files. Any process may use one; what cannot be read counts as absent."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def write(self, status: ProcessStatus) -> None:
        """Replace the process's file. Raises ``OSError``.

        On a disk without room the file's time still says ``loop_at``, its mode ``handed_over``.
        """
        file, fresh = self.path / f"{status.pid}.json", self.path / f"{status.pid}.new"
        times = (status.loop_at, status.loop_at)
        try:
            fresh.write_text(json.dumps(asdict(status)), encoding="utf-8")
            os.utime(fresh, times)
            fresh.replace(file)
        except OSError:
            with suppress(OSError):
                os.utime(file, times)
                if status.handed_over:
                    file.chmod(_CANNOT_BE_WRITTEN)
            raise

    def read(self) -> list[ProcessStatus]:
        """Of every process that has written and still exists."""
        found = []
        for file in sorted(self.path.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                status = ProcessStatus(**json.loads(file.read_text(encoding="utf-8")))
                os.kill(status.pid, 0)  # raises for a process that has ended
                state = file.stat()
                found.append(
                    replace(
                        status,
                        loop_at=max(status.loop_at, state.st_mtime),
                        requests=tuple(status.requests),
                        handed_over=status.handed_over or not state.st_mode & _WRITABLE,
                    )
                )
        return found

    def ask_to_drain(self, deadline: float) -> None:
        """Have every process drain; at ``deadline`` what still runs ends. Raises ``OSError``."""
        file, fresh = self.path / DRAIN, self.path / f"{DRAIN}.new"
        times = (deadline, deadline) if deadline < _NO_DEADLINE else None
        if file.exists():
            os.utime(file, times)
            return
        fresh.touch()
        os.utime(fresh, times)
        fresh.replace(file)

    def drain_deadline(self) -> float | None:
        """``None`` where nobody asked; infinite where no time was named."""
        try:
            deadline = (self.path / DRAIN).stat().st_mtime
        except OSError:
            return None
        return deadline if deadline < _NO_DEADLINE else math.inf

    def clear(self) -> None:
        """Remove all that an earlier server left: its processes' numbers come again."""
        for file in (*self.path.glob("*.json"), *self.path.glob(f"*{_LONGEST}"), self.path / DRAIN):
            file.unlink(missing_ok=True)

    def tell_longest(self, model: str, tokens: int) -> None:
        """Say how long a sequence an engine of this server takes, where its configuration leaves
        that to it. Raises ``OSError``."""
        (self.path / f"{model}{_LONGEST}").write_text(str(tokens), encoding="ascii")

    def longest(self, model: str) -> int | None:
        """What ``model`` has told."""
        with suppress(OSError, ValueError):
            return int((self.path / f"{model}{_LONGEST}").read_text(encoding="ascii"))
        return None

    def forget_drain(self) -> None:
        """Remove what was left by an earlier server, and be ready for one. Raises ``OSError``."""
        (self.path / DRAIN).unlink(missing_ok=True)
        (self.path / f"{DRAIN}.new").touch()

    @property
    def handed_over(self) -> bool:
        """Whether every process has handed over; true where there is none."""
        return all(status.handed_over for status in self.read())
