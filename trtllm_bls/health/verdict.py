"""What observations of a server mean: is it ready, and is it beyond help?

The rule that load alone never makes a server unready: nothing that is merely late counts, as long
as anything at all moves. A response to any request, or the answer to a canary (a request for one
token that the probe sends itself), is progress; so is a step of the engine, since requests that do
not stream are silent until they end; and so is a refusal for want of room, while others are served.
Only when nothing has moved for the stall limit is the server taken for stuck. What a machine under
load does not do by itself counts at once: a process that is dead or stopped, a model that is not
loaded, a canary that fails twice, no shared memory or file descriptors left, and an event loop that
has no turn while another thread of its process has 60: both wait for a core alike.

Pure: times are seconds of one clock, handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

CANARY_FAILURES = 2  # in a row; one may be an accident
MISSED_TURNS = 60  # three seconds, or longer where there is load


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """``stall_s``: without any progress for so long a server is not ready, for twice so long it
    has failed; unless ``engine_elsewhere``, where nothing is mended by another start of the
    server. It has failed, too, when it had no file descriptors left for twice so long: who connects
    to it then is neither answered nor refused. ``shared_memory``: the fewest bytes free."""

    stall_s: float = 30.0
    shared_memory: int = 4 * 2**20
    engine_elsewhere: bool = False


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What is known of a server. ``None`` means that it is not looked at.

    ``processes``: what is wrong with them; ``descriptors``: which of them have none left, and
    ``descriptors_at``: when all of them last had some.
    ``progress_at``: when a response last left, an engine made a step or a canary was answered.
    ``loop_at``: when the event loop turned last, of the process where that is longest ago.
    ``missed_turns``: of the event loop that missed most (``status``). ``engine``: what is wrong
    with an engine that was asked for its health. ``canary_failures``: in a row.
    """

    processes: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    descriptors_at: float | None = None
    models: tuple[str, ...] = ()
    engine: str | None = None
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


def evaluate(observed: Observed, bounds: Bounds, now: float) -> Verdict:
    """What the observations mean."""
    reasons = [*observed.processes, *observed.descriptors]
    reasons += [f"model {model} is not ready" for model in observed.models]
    reasons += [observed.engine] if observed.engine else []
    if observed.canary_failures >= CANARY_FAILURES:
        reasons.append(f"a request for one token fails: {observed.canary_error}")
    silent = _age(observed.progress_at, now)
    if silent > bounds.stall_s:
        reasons.append(f"no response has left for {silent:.0f} s")
    stuck = _age(observed.loop_at, now)
    if stuck > bounds.stall_s or observed.missed_turns >= MISSED_TURNS:
        reasons.append(f"an event loop has been stuck for {stuck:.0f} s")
    free = observed.shared_memory
    if free is not None and free < bounds.shared_memory:
        reasons.append(f"/dev/shm is full: {free // 1024} KiB are free")
    exhausted = _age(observed.descriptors_at, now)
    longest = max(0.0 if bounds.engine_elsewhere else silent, stuck, exhausted)
    failed = bool(observed.processes) or longest > 2 * bounds.stall_s
    return Verdict(tuple(reasons), failed)


def _age(moment: float | None, now: float) -> float:
    return 0.0 if moment is None else now - moment
