"""What an engine in Python reports of itself: its steps and requests, on Triton's ``/metrics`` as
the C++ backend does, and its longest sequence, in the status directory.

``serve`` reads the steps to tell an engine at work from one that hangs. Requests that do not stream
leave no other trace until they end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trtllm_bls.engines.base import Engine
from trtllm_bls.errors import EngineError
from trtllm_bls.parameters import STATUS_DIR
from trtllm_bls.status import (
    ENGINE_REQUESTS,
    ENGINE_STEPS,
    REQUESTS_LABEL,
    STEPS_LABEL,
    StatusDirectory,
)

EVERY_SECONDS = 1.0  # each report is a round trip to the server

log = logging.getLogger(__name__)


async def tell_longest(engine: Engine, model: str) -> None:
    """Write the engine's longest sequence, in tokens, for the other processes of ``serve``."""
    try:
        directory = os.environ.get(STATUS_DIR)
        longest = (await engine.capacity()).max_sequence_tokens
        if directory and longest:
            StatusDirectory(directory).tell_longest(model, longest)
    except (EngineError, OSError) as error:
        log.warning("%s: /v1/models does not tell its longest sequence: %s", model, error)


class EngineSteps:
    """Reports ``figures()`` every second until closed, on a thread: steps and requests, by the
    values of their labels. ``args``: of the model's ``initialize``."""

    def __init__(
        self, pb_utils: Any, args: Mapping[str, str], figures: Callable[[], Mapping[str, int]]
    ) -> None:
        # Triton drops a family or a series that is not referenced.
        self._families, self._series = dict[str, Any](), dict[str, Any]()
        for name in (ENGINE_STEPS, ENGINE_REQUESTS):
            meaning = "Of the engine, as TensorRT-LLM names and labels them"
            kind = pb_utils.MetricFamily.GAUGE
            self._families[name] = pb_utils.MetricFamily(name=name, description=meaning, kind=kind)
        self._figures, self._told = figures, dict.fromkeys(figures(), 0)
        for value in self._told:
            is_steps = value == STEPS_LABEL[1]
            family = self._families[ENGINE_STEPS if is_steps else ENGINE_REQUESTS]
            labels = {"model": args["model_name"], "version": args["model_version"]}
            labels[STEPS_LABEL[0] if is_steps else REQUESTS_LABEL] = value
            self._series[value] = family.Metric(labels=labels)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(EVERY_SECONDS):
            try:
                for name, now in self._figures().items():
                    if now != self._told[name]:
                        # Triton adds up the series of several processes: each adds what is new.
                        self._series[name].increment(now - self._told[name])
                        self._told[name] = now
            except Exception:  # whatever Triton raises, requests go on
                log.exception("the engine's figures could not be told")
