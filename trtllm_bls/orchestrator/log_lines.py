"""This package's log lines: in Triton's log, or as Triton writes them."""

from __future__ import annotations

import faulthandler
import json
import logging
import re
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from trtllm_bls.errors import printable


class _OneRecord(logging.Formatter):
    """Indents the lines of a traceback, so that none looks like another record.

    A message may quote a client's text.
    """

    def format(self, record: logging.LogRecord) -> str:
        message, *traceback = super().format(record).split("\n")
        lines = [printable(message)]
        for line in traceback:
            text = line.lstrip(" ")
            indentation = line[: len(line) - len(text)]
            lines.append(f"    {indentation}{printable(text)}")
        return "\n".join(lines)


class TritonLogHandler(logging.Handler):
    """Sends the package's log records to Triton's log, level kept."""

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        super().__init__()
        self._logger = pb_utils.Logger
        self._model_name = model_name
        self.setFormatter(_OneRecord())

    def emit(self, record: logging.LogRecord) -> None:
        text = f"[{self._model_name}] {self.format(record)}"
        if record.levelno >= logging.ERROR:
            self._logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            self._logger.log_warn(text)
        else:
            self._logger.log_info(text)


def log_to_triton(pb_utils: Any, model_name: str) -> None:
    """Route this package's logging to Triton; called by each model's ``initialize``.

    A crash or SIGABRT of the process also writes its Python stacks there.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable()
    logger = logging.getLogger("trtllm_bls")
    logger.handlers = [TritonLogHandler(pb_utils, model_name)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


_BY_PROCESS = re.compile(r"\[(?P<process>[\w.-]+)\] (?P<text>.*)", re.DOTALL)


def json_line(text: str, level: str = "info", source: str = "") -> str:
    """Return a line of a log as one JSON object with the time of now.

    It has the members of a text that is a JSON object itself, else the text as its message.
    """
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    fields: dict[str, Any] = {"time": now, "level": level}
    if source:
        fields["source"] = source
    if record := _BY_PROCESS.fullmatch(text):
        fields["process"] = record["process"]
        text = record["text"]
    members = {"message": text}
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            members = value
    return json.dumps(members | fields)


class _JsonRecord(_OneRecord):
    def format(self, record: logging.LogRecord) -> str:
        source = f"{record.filename}:{record.lineno}"
        return json_line(super().format(record), record.levelname.lower(), source)


def log_to_stderr(name: str, *, as_json: bool = False) -> None:
    """Log to stderr, in the form of Triton's lines; for process ``name`` outside Triton."""
    line = f"[{name}] %(message)s"
    formatter: logging.Formatter
    if as_json:
        formatter = _JsonRecord(line)
    else:
        prefix = "%(levelname).1s%(asctime)s.%(msecs)03d %(process)d %(filename)s:%(lineno)d] "
        formatter = _OneRecord(prefix + line, "%m%d %H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("trtllm_bls").setLevel(logging.INFO)
