"""Every error this package raises on purpose, the Triton status each one becomes, and why a request
was cancelled.

    TrtllmBlsError
    ├── SetupError: SettingsError, TokenizerError, CheckpointError
    ├── InvalidRequest: PromptTooLong, Unsupported
    ├── Overloaded, Stopped
    ├── EngineError: EngineUnavailable, EngineStalled
    └── ClientError: ConnectionFailed, DeadlineExceeded

Broad to catch, narrow to act on. The message is always one line that a user may read: no
paths, no traceback. Owns nothing but these classes; imports nothing of this package.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import Enum
from typing import ClassVar

log = logging.getLogger(__name__)

# Kinds of errors that nobody raised on purpose, until ``trtllm_bls_internal_errors_total`` counts
# them.
defects: deque[str] = deque(maxlen=10_000)


class TrtllmBlsError(Exception):
    """Base of all errors raised on purpose; ``status`` names a ``pb_utils.TritonError`` code."""

    status: ClassVar[str] = "INTERNAL"


class SetupError(TrtllmBlsError):
    """Something on this machine must be fixed before anything can be served."""


class SettingsError(SetupError):
    """A parameter or command-line option has a value that cannot be used."""


class TokenizerError(SetupError):
    """The tokenizer directory is missing, corrupt or incomplete."""


class CheckpointError(SetupError):
    """The model directory is missing, corrupt, or of an architecture we cannot run exactly."""


class InvalidRequest(TrtllmBlsError):
    """The request breaks the contract. ``field`` is the tensor's wire name; ``limit``, where one of
    the deployment's was broken, the parameter that sets it."""

    status = "INVALID_ARG"

    def __init__(self, field: str, problem: str, limit: str | None = None) -> None:
        super().__init__(f"{field}: {problem}")
        self.limit = limit
        self.field = field
        self.problem = problem


class PromptTooLong(InvalidRequest):
    """The prompt has ``tokens`` tokens, and the model takes ``most``."""

    def __init__(self, field: str, tokens: int, most: int) -> None:
        super().__init__(field, f"{tokens}{_TOO_MANY}{most} are allowed so that one new token fits")
        self.tokens = tokens
        self.most = most


class Unsupported(InvalidRequest):
    """The request is well formed, but this deployment cannot honour the field; never ignored."""

    status = "UNSUPPORTED"


class Overloaded(TrtllmBlsError):
    """Admission was refused; no work was started.

    ``limit``: the parameter that sets the limit. ``retry_after_s``: when there may be room, where
    others are being served; ``None`` where nobody is.
    """

    status = "UNAVAILABLE"

    def __init__(
        self, problem: str, limit: str | None = None, retry_after_s: int | None = None
    ) -> None:
        again = "" if retry_after_s is None else f"{_AGAIN}{retry_after_s} s"
        super().__init__(problem + again)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Stopped(TrtllmBlsError):
    """The caller's request to stop ended it."""

    status = "CANCELLED"


class EngineError(TrtllmBlsError):
    """The engine answered this request with an error; the message is the engine's own."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, or the connection broke while it was answering."""

    status = "UNAVAILABLE"


class EngineStalled(EngineError):
    """The engine sent nothing for longer than the stall limit, in seconds."""

    status = "UNAVAILABLE"


class ClientError(TrtllmBlsError):
    """A client's request got no complete answer, and no error from the server either."""


class ConnectionFailed(ClientError):
    """The server cannot be reached, or the connection broke before the answer was complete."""


class DeadlineExceeded(ClientError):
    """The deadline that the caller gave, in seconds, passed before the answer was complete."""


class CancelCause(str, Enum):
    """Who cancelled a request: what is passed to ``Task.cancel`` of the task that runs it."""

    CALLER_LEFT = "caller_left"  # also where nobody says
    DEADLINE = "deadline"  # its own time was up; the caller has got what there was by then
    SHUTDOWN = "shutdown"
    BATCH = "batch"  # another prompt of its batch failed


_AGAIN = "; try again in about "
_TOO_MANY = " tokens; at most "
PROMPT_FIELDS = ("text_input", "prompt_ids", "input_ids", "messages")
# What Triton's scheduler and TensorRT-LLM's executor say of a full queue; a stream loses their
# code.
_FULL_QUEUE = ("Maximum queue size of", "Exceeds maximum queue size", "exceeds maximum queue size")


def unexpected(error: Exception, request: str) -> TrtllmBlsError:
    """A defect, as a client may see it: its text may hold paths, so that goes to the log alone."""
    log.error("%s: unexpected error", request, exc_info=error)
    defects.append(type(error).__name__)
    return TrtllmBlsError(
        f"unexpected {type(error).__name__}; the server's log tells more under {request}"
    )


HALF_CHARACTER = "is half of a character (a lone surrogate); send both halves, or leave it out"
MAX_DEPTH = 100  # of lists and objects within each other, in all JSON that is walked
_MAX_CONTAINERS = 100_000
_QUOTE, _BACKSLASH = 2, 3
# What each byte of JSON means for its structure: as int8 1 begins a list or object, -1 ends one.
_KINDS = bytes.maketrans(b'[{]}"\\', bytes((1, 1, 255, 255, _QUOTE, _BACKSLASH)))
_KINDS = bytes(after if after != before else 0 for before, after in enumerate(_KINDS))
MAX_LINE = 2000  # characters of an error or of a log line


def half_character(error: UnicodeEncodeError) -> str:
    """What is wrong with a text that cannot be encoded, where, and what to do."""
    return f"{error.object[error.start]!a} at character {error.start} {HALF_CHARACTER}"


def printable(text: str, most: int = MAX_LINE) -> str:
    """``text`` as one line of at most ``most`` characters that moves no cursor.

    What callers send ends up in error messages and logs: white space becomes blanks, every other
    character that does not print is escaped, and the middle of a long text is left out.
    """
    if len(text) > most:
        half = max(0, (most - 40) // 2)
        left_out = len(text) - 2 * half
        text = f"{text[:half]} [{left_out} characters left out] {text[len(text) - half :]}"
    text = " ".join(text.split())
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )[:most]


def to_wire(error: TrtllmBlsError) -> str:
    """The error as one line for a caller: its status first, since streams lose Triton's code."""
    return f"{error.status}: {printable(str(error))}"


def from_wire(text: str) -> TrtllmBlsError:
    """An engine's error text as an error; one of our own engines becomes what it was raised as.

    Only its first line counts: below it, engines write stack traces and paths of theirs.
    """
    text = text.strip().partition("\n")[0].rstrip()
    status, _, rest = text.partition(": ")
    field, _, problem = rest.partition(": ")
    tokens, _, allowed = problem.partition(_TOO_MANY)  # as ``PromptTooLong`` wrote it
    most = allowed.partition(" ")[0]
    sizes = all(number.isdecimal() and len(number) < 19 for number in (tokens, most))
    if status == InvalidRequest.status and field in PROMPT_FIELDS and sizes:
        return PromptTooLong(field, int(tokens), int(most))
    for known in (InvalidRequest, Unsupported):
        if status == known.status and problem:
            return known(field, problem)
    is_full = any(words in text for words in _FULL_QUEUE)
    if is_full or (status == Overloaded.status and rest):
        why = rest if status == Overloaded.status else text
        before, _, seconds = why.rpartition(_AGAIN)  # as ``Overloaded`` wrote it
        number = seconds.removesuffix(" s")
        if before and number.isdecimal() and len(number) < 10:
            return Overloaded(before, retry_after_s=int(number))
        return Overloaded(why, retry_after_s=1 if is_full else None)
    return EngineError(text.removeprefix(f"{EngineError.status}: "))


def structure_problem(text: bytes) -> str | None:
    """Why a parser or a walk would take too long for JSON, ``None`` if none would.

    Lists and objects are counted before any is made. What precedes a mistake in the text is counted
    as a parser reads it, and no parser reads on after one.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return None
    import numpy as np  # which most commands do not need

    kinds = np.frombuffer(text.translate(_KINDS), np.int8)
    places = np.flatnonzero(kinds != 0)
    kinds = kinds[places]
    # In a row of backslashes the first, the third and so on escape the character after them.
    follows = np.diff(places, prepend=-2) == 1
    slashes, numbers = kinds == _BACKSLASH, np.arange(len(kinds))
    in_row = slashes & follows & np.roll(slashes, 1)
    begins = np.maximum.accumulate(np.where(in_row, 0, numbers))
    escapes = slashes & ((numbers - begins) % 2 == 0)
    kinds = kinds[~slashes & ~(follows & np.roll(escapes, 1))]
    in_strings = np.cumsum(kinds == _QUOTE) % 2 == 1
    steps = np.where(in_strings | (kinds == _QUOTE), 0, kinds)  # 1 into a list or object, -1 out
    if np.cumsum(steps).max(initial=0) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} lists and objects within each other; send flatter JSON"
    if np.count_nonzero(steps == 1) > _MAX_CONTAINERS:
        return f"more than {_MAX_CONTAINERS} lists and objects"
    return None
