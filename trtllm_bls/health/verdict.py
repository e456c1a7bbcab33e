"""Whether a server is ready, and whether it has failed, judged from observations.

Load alone must never make a server unready, so a late answer does not count while anything makes
progress. Progress is a response to any request, an answered canary (a request for one token that
the probe sends), or a step of the engine: requests that do not stream send nothing until they end.
A server is stuck only if nothing has made progress for the stall limit.

Some observations count at once, because load does not cause them: a dead or stopped process, a
model that is not loaded, a canary that fails twice, no shared memory or file descriptors left, and
an event loop that had no turn while another thread of its process had 60. Both threads wait for the
same cores, so the loop must be blocked.

No I/O and no clock: times are seconds of one clock, passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

CANARY_FAILURES = 2  # in a row; one may be an accident
MISSED_TURNS = 60  # three seconds, or longer where there is load
LEAST_SHARED_MEMORY = 4 * 2**20  # bytes free


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Observations of a server; ``None`` means not observed.

    ``processes``: lines about dead or stopped processes. ``descriptors``: lines about processes
    without file descriptors; ``descriptors_at``: when every process last had some.
    ``progress_at``: when a response was last sent, an engine made a step or a canary was answered.
    ``loop_at``: the oldest last turn of any process's event loop. ``missed_turns``: the most turns
    that an event loop has missed (``status``). ``engine``: the problem that an engine reported
    about itself; ``engine_elsewhere``: no engine is in this server. ``canary_failures``: failures
    in a row.
    """

    processes: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    descriptors_at: float | None = None
    models: tuple[str, ...] = ()
    engine: str | None = None
    engine_elsewhere: bool = False
    progress_at: float | None = None
    loop_at: float | None = None
    missed_turns: int = 0
    canary_failures: int = 0
    canary_error: str = ""
    shared_memory: int | None = None


@dataclass(frozen=True)
class Verdict:
    """``reasons`` why it is not ready, one line each; ``failed``: it will not recover by itself."""

    reasons: tuple[str, ...] = ()
    failed: bool = False

    @property
    def ready(self) -> bool:
        return not self.reasons


def evaluate(observed: Observed, now: float, stall_s: float = 30.0) -> Verdict:
    """What the observations mean.

    A server without progress for ``stall_s`` is not ready. After twice as long it has failed,
    unless its engine is elsewhere, because a restart of the server would not restart the engine.
    One without file descriptors has also failed after twice ``stall_s``: it neither accepts nor
    refuses connections.
    """
    reasons = [*observed.processes, *observed.descriptors]
    reasons += [f"model {model} is not ready" for model in observed.models]
    reasons += [observed.engine] if observed.engine else []
    if observed.canary_failures >= CANARY_FAILURES:
        reasons.append(f"a request for one token fails: {observed.canary_error}")
    silent = _age(observed.progress_at, now)
    if silent > stall_s:
        reasons.append(f"no response has left for {silent:.0f} s")
    stuck = _age(observed.loop_at, now)
    if stuck > stall_s or observed.missed_turns >= MISSED_TURNS:
        reasons.append(f"an event loop has been stuck for {stuck:.0f} s")
    free = observed.shared_memory
    if free is not None and free < LEAST_SHARED_MEMORY:
        reasons.append(f"/dev/shm is full: {free // 1024} KiB are free")
    exhausted = _age(observed.descriptors_at, now)
    longest = max(0.0 if observed.engine_elsewhere else silent, stuck, exhausted)
    failed = bool(observed.processes) or longest > 2 * stall_s
    return Verdict(tuple(reasons), failed)


def _age(moment: float | None, now: float) -> float:
    return 0.0 if moment is None else now - moment
