"""This package's log lines: in Triton's log, or as Triton writes them."""

from __future__ import annotations

import logging
from typing import Any

from trtllm_bls.errors import printable


class _OneRecord(logging.Formatter):
    """Indents the lines of a traceback, so that none looks like another record.

    A message may quote a client's text.
    """

    def format(self, record: logging.LogRecord) -> str:
        first, *more = super().format(record).split("\n")
        parts = [(line, line.lstrip(" ")) for line in more]
        indented = [line[: len(line) - len(text)] + printable(text) for line, text in parts]
        return "\n".join([printable(first), *(f"    {line}" for line in indented)])


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
    """Route this package's logging to Triton; called by each model's ``initialize``."""
    logger = logging.getLogger("trtllm_bls")
    logger.handlers = [TritonLogHandler(pb_utils, model_name)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to_stderr(name: str) -> None:
    """Log to stderr, in the form of Triton's lines; for process ``name`` outside Triton."""
    prefix = "%(levelname).1s%(asctime)s.%(msecs)03d %(process)d %(filename)s:%(lineno)d]"
    handler = logging.StreamHandler()
    handler.setFormatter(_OneRecord(f"{prefix} [{name}] %(message)s", "%m%d %H:%M:%S"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("trtllm_bls").setLevel(logging.INFO)
