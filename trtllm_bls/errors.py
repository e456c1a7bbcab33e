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

from enum import Enum
from typing import ClassVar


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
    """The prompt has more tokens than the model takes."""


class Unsupported(InvalidRequest):
    """The request is well formed, but this deployment cannot honour the field; never ignored."""

    status = "UNSUPPORTED"


class Overloaded(TrtllmBlsError):
    """Admission was refused; no work was started. ``limit``: the parameter that sets the limit."""

    status = "UNAVAILABLE"

    def __init__(self, problem: str, limit: str | None = None) -> None:
        super().__init__(problem)
        self.limit = limit


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


# What Triton's scheduler and TensorRT-LLM's executor say of a full queue; a stream loses their
# code.
_FULL_QUEUE = ("Maximum queue size of", "Exceeds maximum queue size", "exceeds maximum queue size")


def is_for_room(error: Overloaded) -> bool:
    """Whether it says that others are being served, rather than that nobody can be: both have the
    same status, and callers may send both again."""
    return "try again" in str(error) or any(words in str(error) for words in _FULL_QUEUE)


HALF_CHARACTER = "is half of a character (a lone surrogate); send both halves, or leave it out"
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
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)[:most]


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
    for known in (InvalidRequest, Unsupported):
        if status == known.status and problem:
            return known(field, problem)
    if status == Overloaded.status and rest:
        return Overloaded(rest)
    if any(words in text for words in _FULL_QUEUE):
        return Overloaded(text)
    return EngineError(text.removeprefix(f"{EngineError.status}: "))
