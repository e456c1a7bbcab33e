"""The server's log: parsed lines, and the few events in them that the launcher acts on.

Owns the form of Triton's log lines and the texts to search for (release 24.10). No I/O.
"""

from __future__ import annotations

import json
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from trtllm_bls.operate.triton_reasons import remedy_of

TAIL_LINES = 400
_FAILURE_LINES = 12  # in the report of a failure

# I1121 01:56:47.026953 6110 model_lifecycle.cc:839] "successfully loaded 'echo'"
_STRUCTURED = re.compile(
    r"(?P<severity>[IWEF])\d{4} (?P<time>\d\d:\d\d:\d\d)[.\d]* +\d+ (?P<source>[^\s:]+):\d+\] ?"
    r"(?P<text>.*)"
)
_SEVERITIES = {"I": "info", "W": "warning", "E": "error", "F": "fatal"}
# Tables, empty lines, the stub's tracebacks, which Triton repeats with the model's name, and the
# addresses that Triton prints of a crash, which ``serve`` reports in a line.
_FURNITURE = re.compile(
    r"\s*(?:[+|].*)?|At:|  .+\(\d+\): .+|Signal \(\d+\) received\.|"
    r" *\d+# (?:0x[0-9A-Fa-f]+|.+ in ).*"
)

_LOADED = re.compile(r"successfully loaded '([^']+)'")
_UNLOADED = re.compile(r"successfully unloaded '([^']+)' version \d+")
_FAILURE_TEXTS = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.+)", re.DOTALL),
    re.compile(r"failed to load model '(?P<model>[^']+)': (?P<reason>.+)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.+)", re.DOTALL),
    # The path in the message names the model. Part by part, so that a long text is read once.
    re.compile(
        r"Failed to preinitialize Python stub: "
        r"(?P<reason>(?:[^/']*[/'])*?(?P<model>[^/']+)/\d+/[^/']+'.*)",
        re.DOTALL,
    ),
)
_HANGS = _FAILURE_TEXTS[-1]  # Triton waits for this stub for ever.
_FAILED_ENSEMBLE = (
    re.compile(r"Invalid argument: (?P<reason>(?:in )?ensemble '?(?P<model>[^\s',]+)'?,? .+)"),
    re.compile(
        r"Invalid argument: (?P<reason>circular dependency between ensembles: (?P<model>\S+) -> .+)"
    ),
)
# Printed just before a line of _FAILURE_TEXTS that names the file alone.
_PARSE_ERROR = re.compile(r"\[libprotobuf ERROR .+\] Error parsing text-format \S+: (.+)")
_UNREADABLE_CONFIG = re.compile(r"failed to read text proto from (\S+)")
_REQUEST = re.compile(r"\[request id: <id_unknown>\] ")
# Repeated with the model's name, by a line that is in _FAILURE_TEXTS.
_FAILED_INSTANCE = re.compile(r"ERROR: Failed to create instance: ")
_STATUS = re.compile(r"^(?:Internal|Invalid argument|Unavailable|Not found|Unknown): ")
# How the Python backend writes this package's errors: class and message.
_OWN_ERROR = re.compile(r"(?:Setup|Settings|Tokenizer|Checkpoint)Error: ")
_DEAD_STUB = re.compile(r"Stub process '[^']+' is not healthy\.")
_TRACE = "\n\nAt:\n"
_INTERPRETER = re.compile(r"<frozen |/importlib/")
# The Python backend's shared memory now and then loses a race while its stubs start.
_LOCK_EXCEPTION = "boost::interprocess::lock_exception"
_IN_FLIGHT = re.compile(r"Found (\d+) model versions that have in-flight inferences")
_PORT_TAKEN = re.compile(r"failed to start (\w+) service: .{0,200} already in use")

# Logged on every machine without a GPU, as warnings or errors.
_NO_GPU = re.compile(
    r"CUDA driver version is insufficient|CudaDriverHelper has not been init|"
    r"DCGM unable to start|Failed to initialize NVML"
)


@dataclass(frozen=True)
class LogLine:
    """A line of the log; ``severity`` is empty if a model or library printed it by itself."""

    raw: str
    text: str
    severity: str = ""
    time: str = ""
    source: str = ""

    @property
    def noteworthy(self) -> bool:
        """True if the line is shown without ``--verbose``."""
        if _NO_GPU.search(self.text) or _FURNITURE.fullmatch(self.text):
            return False
        if _FAILED_INSTANCE.match(self.text) or _PARSE_ERROR.match(self.text):
            return False
        if any(pattern.match(self.text) for pattern in (*_FAILURE_TEXTS, *_FAILED_ENSEMBLE)):
            return False  # shown once, in the end, by ``LogBook.failure_summary``
        # Lines of a model or the OpenAI API count, for example the line of a request.
        return self.severity != "info" or self.source.endswith(".py")

    @property
    def problem(self) -> bool:
        """True for a warning or worse."""
        return self.severity not in ("", "info")

    @property
    def readable(self) -> str:
        """The line for people: time, severity if it matters, and real line breaks."""
        if not self.severity:
            return self.text
        if not self.problem:
            return f"{self.time} {self.text}"
        return f"{self.time} {self.severity}: {self.text}"


def parse(raw: str) -> LogLine:
    """Read one line of the server's output, without its newline."""
    match = _STRUCTURED.fullmatch(raw)
    if match is None:
        return LogLine(raw, raw)
    text = match["text"].strip()
    if text.startswith('"'):
        with suppress(ValueError):  # Triton writes messages as JSON strings; other libraries do not
            text = str(json.loads(text)).strip()
    severity = _SEVERITIES[match["severity"]]
    return LogLine(raw, text, severity, match["time"], match["source"])


class LogBook:
    """A reader of the log, line by line, that remembers the fate of each model."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: set[str] = set()
        self.failures: dict[str, str] = {}  # model -> reason, with its traceback
        self.port_taken: str | None = None  # the service that could not listen
        self.lock_exception = False  # Triton died of it, or one of its stubs
        self.drained = False  # the server is stopping, and every request has ended
        self.hangs = False  # Triton waits for a model that has failed
        self._parse_error = ""  # the latest error in a configuration
        self._tail: deque[LogLine] = deque(maxlen=TAIL_LINES)

    def add(self, raw: str) -> LogLine:
        """Take a line; return it parsed."""
        line = parse(raw)
        self._tail.append(line)
        if loaded := _LOADED.fullmatch(line.text):
            self.loaded.append(loaded[1])
        if unloaded := _UNLOADED.fullmatch(line.text):
            self.unloaded.add(unloaded[1])
        if in_flight := _IN_FLIGHT.search(line.text):
            self.drained = in_flight[1] == "0"
        if port_taken := _PORT_TAKEN.search(line.text):
            self.port_taken = port_taken[1]
        self.lock_exception = self.lock_exception or _LOCK_EXCEPTION in raw
        self.hangs = self.hangs or bool(_HANGS.match(line.text))
        if parse_error := _PARSE_ERROR.fullmatch(line.text):
            self._parse_error = parse_error[1]
        for pattern in (*_FAILURE_TEXTS, *_FAILED_ENSEMBLE):
            if failure := pattern.match(line.text):
                reason = failure["reason"].strip()
                if _UNREADABLE_CONFIG.fullmatch(reason):
                    reason = f"{reason}: {self._parse_error}"
                self.failures.setdefault(failure["model"], reason)
        return line

    @property
    def is_triton(self) -> bool:
        """True where one of the last lines has the form of Triton's."""
        return any(line.severity for line in self._last_lines())

    def tail(self, count: int = _FAILURE_LINES) -> tuple[str, ...]:
        """Return the last noteworthy lines; if there are none, the last lines of any kind."""
        last = self._last_lines()
        lines = [line for line in last if line.noteworthy] or last
        return tuple(line.readable for line in lines[-count:])

    def _last_lines(self) -> list[LogLine]:
        """Return a copy: another thread may add lines, during which nobody can go through them."""
        return list(self._tail)

    def reasons(self) -> dict[str, str]:
        """Return the reason why each model did not load, in one line, by model."""
        reasons = {}
        for model, failure in self.failures.items():
            text = _STATUS.sub("", failure.partition(_TRACE)[0], count=1)
            words = " ".join(_OWN_ERROR.sub("", _REQUEST.sub("", text)).split())
            # Triton says it once for each sample of a warm-up.
            reasons[model] = "; ".join(dict.fromkeys(words.rstrip(".:; ").split("; ")))
            if _DEAD_STUB.fullmatch(text):
                reasons[model] = "its Python process died while loading"
        return reasons

    def failure_summary(self) -> str:
        """Return a line that names every model that did not load, and each reason once."""
        models: dict[str, list[str]] = {}
        for model, reason in self.reasons().items():
            models.setdefault(reason, []).append(model)
        sentences = []
        for reason, names in models.items():
            sentence = f"model {names[0]} did not load: {reason}"
            if len(names) > 1:
                sentence = f"models {', '.join(names)} did not load: {reason}"
            if remedy := remedy_of(reason):
                sentence += f"; {remedy}"
            sentences.append(sentence)
        return "; ".join(sentences)

    def failure_details(self) -> tuple[str, ...]:
        """Return the last lines that models printed, then the lines of their tracebacks.

        Empty if all errors are this package's own, whose one line says enough.
        """
        if all(_OWN_ERROR.match(_STATUS.sub("", text)) for text in self.failures.values()):
            return ()
        output = [line.text for line in self._last_lines() if line.noteworthy and not line.severity]
        traces = []
        for model, text in self.failures.items():
            _, _, trace = text.partition(_TRACE)
            for line in trace.splitlines():
                if not _INTERPRETER.search(line):
                    traces.append(f"{model}: {line.strip()}")
        return (*output[-_FAILURE_LINES:], *traces)
