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
        directory, longest = (
            os.environ.get(STATUS_DIR),
            (await engine.capacity()).max_sequence_tokens,
        )
        if directory and longest:
            StatusDirectory(directory).tell_longest(model, longest)
    except (EngineError, OSError) as error:
        log.warning("%s: /v1/models does not tell its longest sequence: %s", model, error)


def told_longest(directory: str, model: str) -> int | None:
    """The longest sequence of ``model`` in tokens, if it is in the status directory."""
    return StatusDirectory(directory).longest(model) if directory else None


class EngineSteps:
    """Reports ``steps()``, and each of ``requests()`` by its kind, every second until closed, on a
    thread. ``args``: of the model's ``initialize``."""

    def __init__(
        self,
        pb_utils: Any,
        args: Mapping[str, str],
        steps: Callable[[], int],
        requests: Callable[[], Mapping[str, int]],
    ) -> None:
        # Triton drops a family or a series that is not referenced.
        self._families = [
            pb_utils.MetricFamily(
                name=name,
                description=f"{what} of the engine, as TensorRT-LLM names and labels them",
                kind=pb_utils.MetricFamily.GAUGE,
            )
            for name, what in ((ENGINE_STEPS, "Steps"), (ENGINE_REQUESTS, "Requests"))
        ]
        of_steps, of_requests = self._families
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._steps, self._requests = steps, requests
        self._series = {STEPS_LABEL[1]: of_steps.Metric(labels=labels | dict([STEPS_LABEL]))}
        for kind in requests():
            self._series[kind] = of_requests.Metric(labels=labels | {REQUESTS_LABEL: kind})
        self._told = dict.fromkeys(self._series, 0)
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
                for name, now in {STEPS_LABEL[1]: self._steps(), **self._requests()}.items():
                    if now != self._told[name]:
                        # Triton adds up the series of several processes, so each adds its own
                        # difference.
                        self._series[name].increment(now - self._told[name])
                        self._told[name] = now
            except Exception:  # whatever Triton raises, requests go on
                log.exception("the engine's steps could not be told")
