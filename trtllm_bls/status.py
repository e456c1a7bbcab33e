"""What the processes of one server tell each other, through files in one directory.

Every process of ``tensorrt_llm_bls``, and of the OpenAI API beside it, keeps ``<pid>.json`` there:
that its threads run, what it has sent, which requests run. Whoever is about to stop the server
writes ``drain``, the last moment for requests, as seconds of ``time.monotonic()``, which all
processes of a machine share. A process that has sent all its requests to the engine, and takes no
more, says so: then Triton may stop.

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

# Names the variable with the id of ``serve``'s own requests, which are neither counted nor logged.
# Nobody else can guess it, so that no caller hides.
CANARY_ID = "TRTLLM_BLS_CANARY_ID"


@dataclass(frozen=True)
class ProcessStatus:
    """One process; times are seconds of ``time.monotonic()``.

    ``loop_at``: when its event loop last turned. ``responses``: made so far, errors left out.
    ``requests``: the ids of some that run, of ``running``. ``handed_over``: it takes no new
    requests, and needs no further request to the engine for those that run. ``engine_problem``:
    what an engine in another process says is wrong with it.
    """

    pid: int
    written_at: float
    loop_at: float
    responses: int
    running: int
    requests: tuple[str, ...] = ()
    handed_over: bool = False
    engine_problem: str | None = None


class StatusDirectory:
    """The files. Any process may use one; what cannot be read counts as absent."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def write(self, status: ProcessStatus) -> None:
        """Replace the process's file. Raises ``OSError``.

        The file's time says ``loop_at``, too: that can be told also on a disk without room.
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
            raise

    def read(self) -> list[ProcessStatus]:
        """Of every process that has written and still exists."""
        found = []
        for file in sorted(self.path.glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                status = ProcessStatus(**json.loads(file.read_text(encoding="utf-8")))
                os.kill(status.pid, 0)  # raises for a process that has ended
                loop_at = max(status.loop_at, file.stat().st_mtime)
                found.append(replace(status, loop_at=loop_at, requests=tuple(status.requests)))
        return found

    def ask_to_drain(self, deadline: float) -> None:
        """Have every process drain; at ``deadline`` what still runs ends. Raises ``OSError``."""
        fresh = self.path / f"{DRAIN}.new"
        fresh.write_text(str(deadline), encoding="utf-8")
        fresh.replace(self.path / DRAIN)

    def drain_deadline(self) -> float | None:
        """``None`` where nobody asked; infinite where no time was named."""
        try:
            return float((self.path / DRAIN).read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError:
            return math.inf

    def clear(self) -> None:
        """Remove all that an earlier server left: its processes' numbers come again."""
        for file in (*self.path.glob("*.json"), self.path / DRAIN):
            file.unlink(missing_ok=True)

    def forget_drain(self) -> None:
        """Remove what was left by an earlier server. Raises ``OSError``."""
        (self.path / DRAIN).unlink(missing_ok=True)

    @property
    def handed_over(self) -> bool:
        """Whether every process has handed over; true where there is none."""
        return all(status.handed_over for status in self.read())
