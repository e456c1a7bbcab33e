"""Every error this package raises on purpose, the Triton status each one becomes, and why a request
was cancelled.

    TrtllmBlsError
    ├── SetupError: SettingsError, TokenizerError, CheckpointError
    ├── InvalidRequest: PromptTooLong, Unsupported
    ├── Overloaded: ShuttingDown
    ├── Stopped
    ├── EngineError: EngineUnavailable (CycleWithoutPlace), EngineStalled, EngineTimeout,
    │                EngineRefusal, CallChainTooLong
    ├── Defect
    └── ClientError: ConnectionFailed, DeadlineExceeded

Broad to catch, narrow to act on. The message is always one line that a user may read: no paths, no
traceback. A program reads attributes, never the message. Between processes an error is one line of
text, which ``to_wire`` writes and ``from_wire`` reads:

    STATUS: message [name=value ...]
    INVALID_ARG: FIELD: problem [name=value ...]

The brackets hold the attributes in ``wire_attributes`` and are left out where there are none.
Imports nothing of this package.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

log = logging.getLogger(__name__)

# Kinds of errors that nobody raised on purpose, until ``trtllm_bls_internal_errors_total`` counts
# them.
defects: deque[str] = deque(maxlen=10_000)


class TrtllmBlsError(Exception):
    """Base of all errors raised on purpose; ``status`` names a ``pb_utils.TritonError`` code."""

    status: ClassVar[str] = "INTERNAL"

    @property
    def wire_attributes(self) -> dict[str, int]:
        """The attributes that another process needs to make the same error."""
        return {}


class SetupError(TrtllmBlsError):
    """Something on this machine must be fixed before anything can be served."""


class SettingsError(SetupError):
    """A parameter or command-line option has a value that cannot be used."""


class TokenizerError(SetupError):
    """The tokenizer directory is missing, corrupt or incomplete."""


class CheckpointError(SetupError):
    """The model directory is missing, corrupt, or of an architecture we cannot run exactly."""


class InvalidRequest(TrtllmBlsError):
    """The request breaks the contract.

    ``field``: the tensor's wire name. ``limit``: the parameter whose limit the request exceeds, if
    it exceeds one.
    """

    status = "INVALID_ARG"

    def __init__(self, field: str, problem: str, limit: str | None = None) -> None:
        super().__init__(f"{field}: {problem}")
        self.limit = limit
        self.field = field
        self.problem = problem


class PromptTooLong(InvalidRequest):
    """The prompt has ``tokens`` tokens, and the model takes ``max_tokens``.

    Both are ``None`` if an engine reports it in words of its own, which ``problem`` has.
    """

    def __init__(
        self,
        field: str,
        tokens: int | None = None,
        max_tokens: int | None = None,
        problem: str = "",
    ) -> None:
        if not problem:
            problem = (
                f"{tokens} tokens; at most {max_tokens} are allowed so that one new token fits"
            )
        super().__init__(field, problem)
        self.tokens = tokens
        self.max_tokens = max_tokens

    @property
    def wire_attributes(self) -> dict[str, int]:
        if self.tokens is None or self.max_tokens is None:
            return {"prompt_too_long": 1}
        return {"tokens": self.tokens, "max_tokens": self.max_tokens}

    def of_field(self, field: str) -> PromptTooLong:
        """Return the same error for another field, in which the caller sent the prompt."""
        return PromptTooLong(field, self.tokens, self.max_tokens, self.problem)


class Unsupported(InvalidRequest):
    """This deployment cannot honour a field of a well-formed request, so it refuses the request."""

    status = "UNSUPPORTED"


class Overloaded(TrtllmBlsError):
    """The server has no room for the request, and started no work on it.

    ``limit``: the parameter that sets the limit. ``retry_after_s``: seconds until there may be
    room; ``None`` if no request runs that could make room.
    """

    status = "UNAVAILABLE"

    def __init__(
        self, problem: str, limit: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(problem)
        self.limit = limit
        self.retry_after_s = retry_after_s

    @classmethod
    def for_now(cls, problem: str, retry_after_s: int, limit: str | None = None) -> Overloaded:
        """Return the error of a server that other requests fill. Its message says when to retry."""
        message = f"{problem}; try again in about {retry_after_s} s"
        return cls(message, limit, retry_after_s)

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {} if self.retry_after_s is None else {"retry_after_s": self.retry_after_s}


class ShuttingDown(Overloaded):
    """The server ends, and takes no more requests. Other processes see ``Overloaded``."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; ask another one")


class Stopped(TrtllmBlsError):
    """The caller's request to stop ended it."""

    status = "CANCELLED"


class Defect(TrtllmBlsError):
    """A mistake in the code of this package or of a pipeline. The request may be correct."""

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {"defect": 1}


class EngineError(TrtllmBlsError):
    """The engine answered this request with an error; the message is the engine's own."""


class EngineUnavailable(EngineError):
    """The engine could not be reached, or the connection broke while it was answering."""

    status = "UNAVAILABLE"


class EngineStalled(EngineError):
    """The engine sent nothing for longer than the stall limit, in seconds."""

    status = "UNAVAILABLE"


class EngineRefusal(EngineError):
    """The engine, or another model, refused what a pipeline sent it.

    ``refused``: the error of the engine or model; None: it is not known. ``callers_mistake``: the
    error for the pipeline's caller, if that sent the value; None: the pipeline chose the value.
    Other processes see a plain ``EngineError``.
    """

    def __init__(
        self,
        problem: str,
        refused: InvalidRequest | None = None,
        callers_mistake: InvalidRequest | None = None,
    ) -> None:
        super().__init__(problem)
        self.refused = refused
        self.callers_mistake = callers_mistake


class EngineTimeout(EngineError):
    """The time limit passed before the engine, or another model, had answered."""

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {"timeout": 1}


class CallChainTooLong(EngineError):
    """Too many nested calls of pipelines, for example of one that calls itself without an end."""

    @classmethod
    def of(cls, models: Sequence[str], limit: int) -> CallChainTooLong:
        """Return the error for these nested calls. At most ``limit`` calls may be inner ones."""
        chain = " → ".join(models)
        return cls(f"{chain}: {len(models) - 1} calls inside one another; at most {limit} may be")

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {"call_chain": 1}


class CycleWithoutPlace(EngineUnavailable):
    """A request that holds a place of a pipeline called it again, and no other place is free.

    If the call waited for a place, both might wait for each other.
    """

    @classmethod
    def of(cls, models: Sequence[str], places: int) -> CycleWithoutPlace:
        """Return the error for a chain of calls. All ``places`` of its last model are taken."""
        problem = f"all {places} places of {models[-1]} (max_running_requests) are taken by"
        return cls(f"{' → '.join(models)}: {problem} requests that may wait for this one")

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {"cycle": 1}


class ClientError(TrtllmBlsError):
    """A client's request got no complete answer, and no error from the server either."""


class ConnectionFailed(ClientError):
    """The server cannot be reached, or the connection broke before the answer was complete."""


class DeadlineExceeded(ClientError):
    """The deadline that the caller gave, in seconds, passed before the answer was complete.

    Other processes see ``EngineTimeout``.
    """

    @property
    def wire_attributes(self) -> dict[str, int]:
        return {"timeout": 1}


class CancelCause(str, Enum):
    """The reason why a request is cancelled, as ``Task.cancel`` gives it to the request's task."""

    CALLER_LEFT = "caller_left"  # also if no reason is given
    DEADLINE = "deadline"  # the request's time limit passed; the caller got the answer so far
    SHUTDOWN = "shutdown"
    BATCH = "batch"  # another prompt of the request's batch failed


_STATUSES = frozenset(
    {
        InvalidRequest.status,
        Unsupported.status,
        Overloaded.status,
        Stopped.status,
        EngineError.status,
    }
)
# Errors that another process marks by an attribute.
_MARKED: Mapping[str, type[Defect | EngineError]] = {
    "defect": Defect,
    "timeout": EngineTimeout,
    "call_chain": CallChainTooLong,
    "cycle": CycleWithoutPlace,
}
PROMPT_FIELDS = ("text_input", "prompt_ids", "input_ids", "messages")
# The words of Triton's scheduler and TensorRT-LLM's executor for a full queue. A stream loses the
# code of an error, so only its words tell its kind. The same holds for the words below.
_FULL_QUEUE = ("Maximum queue size of", "Exceeds maximum queue size", "exceeds maximum queue size")
# The words of Triton's core while it stops, and for a model that is not served.
_STOPPING = (
    "scheduler for model has stopped accepting new inference requests",
    "has no available versions",
    "is not at ready state",
    "Server not ready",
)
_NOT_FOUND = " is not found"
_FAILED = "Failed to process the request(s) for model instance"
_TOO_LONG = ("exceeds maximum input length", "exceeds max_seq_len", "exceed max_seq_len")
_MAX_DIGITS = 18  # in an attribute on the wire


def unexpected(error: BaseException, request: str) -> Defect:
    """Make the error for a defect that a client may see.

    The defect's own text may hold paths, so it goes to the log alone.
    """
    log.error("%s: unexpected error", request, exc_info=error)
    defects.append(type(error).__name__)
    return Defect(f"unexpected {type(error).__name__}; the server's log tells more under {request}")


MAX_LINE = 2000  # characters in an error or a log line


def half_character(error: UnicodeEncodeError) -> str:
    """Describe the fault of a text that cannot be encoded, its place, and the remedy."""
    surrogate = f"{error.object[error.start]!a} at character {error.start}"
    return (
        f"{surrogate} is half of a character (a lone surrogate); send both halves, or leave it out"
    )


def printable(text: str, limit: int = MAX_LINE) -> str:
    """Write ``text`` as a line of at most ``limit`` characters that moves no cursor.

    Callers' texts end up in error messages and logs: white space becomes blanks, every other
    character that does not print is escaped, and the middle of a long text is left out.
    """
    if len(text) > limit:
        half = max(0, (limit - 40) // 2)
        omitted = len(text) - 2 * half
        text = f"{text[:half]} [{omitted} characters left out] {text[len(text) - half :]}"
    text = " ".join(text.split())
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))[:limit]


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def to_wire(error: TrtllmBlsError) -> str:
    """Return the error as one line for a caller: its status first, since streams lose Triton's."""
    message = printable(str(error))
    pairs = [f"{name}={value}" for name, value in error.wire_attributes.items()]
    # If the message itself ends in brackets, a reader would take them for attributes. Empty
    # brackets behind them prevent that.
    if pairs or _split_attributes(message)[0] != message:
        message += f" [{' '.join(pairs)}]"
    return f"{error.status}: {message}"


@dataclass(frozen=True)
class WireText:
    """An error's line in its parts. ``status`` is empty if the line begins with no status."""

    status: str
    message: str
    attributes: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> WireText:
        """Read what ``to_wire`` wrote, or any text of another engine.

        Only the first line counts: below it, engines write stack traces and paths.
        """
        line = text.strip().partition("\n")[0].rstrip()
        status, separator, message = line.partition(": ")
        if status not in _STATUSES or not separator:
            return cls("", line, {})
        return cls(status, *_split_attributes(message))


def says_too_long(text: str) -> bool:
    """Return true for TensorRT-LLM's words for a prompt that is too long."""
    return any(words in text for words in _TOO_LONG)


def _split_attributes(message: str) -> tuple[str, dict[str, int]]:
    """Return the message without the attributes behind it, and the attributes."""
    text, bracket, pairs = message.rpartition(" [")
    if not bracket or not pairs.endswith("]"):
        return message, {}
    attributes = {}
    for pair in pairs[:-1].split():
        name, _, digits = pair.partition("=")
        if not (name and digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
            return message, {}
        attributes[name] = int(digits)
    return text, attributes


def triton_status(text: str) -> str:
    """Return gRPC's name of the status of an error of Triton's own, which a stream loses.

    Triton puts the client's request id first, so only the ends of its sentences are looked at.
    """
    if text.endswith(_STOPPING) or any(words in text for words in _FULL_QUEUE):
        return "UNAVAILABLE"
    if text.rpartition("] ")[2].startswith(_FAILED):
        return "INTERNAL"
    if text.endswith(_NOT_FOUND):
        return "NOT_FOUND"
    return "INVALID_ARGUMENT"


def from_wire(text: str) -> TrtllmBlsError:
    """Make an error of an engine's text. An error of this package gets its class again."""
    wire = WireText.parse(text)
    field, _, problem = wire.message.partition(": ")
    if wire.status == InvalidRequest.status and problem:
        if wire.attributes.keys() >= {"tokens", "max_tokens"}:
            sizes = wire.attributes["tokens"], wire.attributes["max_tokens"]
            return PromptTooLong(field, *sizes, problem)
        if "prompt_too_long" in wire.attributes:
            return PromptTooLong(field, problem=problem)
        return InvalidRequest(field, problem)
    if wire.status == Unsupported.status and problem:
        return Unsupported(field, problem)
    for name, kind in _MARKED.items():
        if name in wire.attributes:
            return kind(wire.message)
    retry_after_s = wire.attributes.get("retry_after_s")
    if retry_after_s is None and any(words in wire.message for words in _FULL_QUEUE):
        return Overloaded.for_now(wire.message, 1)
    if wire.status == Overloaded.status:
        return Overloaded(wire.message, retry_after_s=retry_after_s)
    if not wire.status and triton_status(wire.message) == "UNAVAILABLE":
        return EngineUnavailable(wire.message)
    if says_too_long(wire.message):
        return PromptTooLong("input_ids", problem=wire.message)
    if wire.status in ("", EngineError.status):
        return EngineError(wire.message)
    return EngineError(f"{wire.status}: {wire.message}")
