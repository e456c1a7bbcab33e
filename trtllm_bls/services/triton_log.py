"""This package's log lines in Triton's log."""

from __future__ import annotations

import logging
from typing import Any


class TritonLogHandler(logging.Handler):
    """Sends the package's log records to Triton's log, level kept."""

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        super().__init__()
        self._logger = pb_utils.Logger
        self._model_name = model_name

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
