"""A server with every pipeline of the live tests, and requests to them; the engine says the prompt
back."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.helpers.server_settings import ROOT
from tests.helpers.tiers import FULL
from tests.helpers.waiting import STREAM_S
from tests.helpers.watched import RecentLines
from tests.live import typed_models
from trtllm_bls.configure.new import config_of
from trtllm_bls.operate.logs import LogLine
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings

EXAMPLES = ROOT / "examples"
# Their tests are slow, or another file's. Each with a language model takes 4 s of CPU to load.
SLOW_EXAMPLES = ("best_of_n", "cosy", "vision")
# The file here that each of them runs, and its parameters.
OWN: dict[str, tuple[str, dict[str, str]]] = {
    "caller": ("caller", {}),
    "counter": ("inner", {}),
    "ends": ("ends", {}),
    "few": ("inner", {"max_running_requests": "4"}),
    "first": ("inner", {}),
    "hasty": ("inner", {"request_timeout_seconds": "2"}),
    "second": ("inner", {}),
}
TWO_PROCESSES = "instance_group [{ count: 2, kind: KIND_CPU }]"
LONG = "the quick brown fox jumps over the lazy dog and runs into the woods again " * 8
# The engine says it back for longer than a test waits: what ends sooner was ended.
ENDLESS = LONG * 120
# The first test waits until all models are loaded, one after the other on a busy machine.
LOAD_S = 900
TIME_LIMIT = pytest.mark.timeout(LOAD_S + 300)


def with_pipelines(server: ServeSettings) -> ServeSettings:
    """Add the pipelines to the repository of a server that has not started."""
    repository = server.model_repository
    assert repository is not None
    for model in EXAMPLES.iterdir():
        if (model / "config.pbtxt").is_file() and (FULL or model.name not in SLOW_EXAMPLES):
            shutil.copytree(model, repository / model.name)
    for name, (file, parameters) in OWN.items():
        write(repository / name, (Path(__file__).parent / f"{file}.py").read_text(), parameters)
    counter = repository / "counter" / "config.pbtxt"
    counter.write_text(counter.read_text() + TWO_PROCESSES)
    typed_models.write(repository)
    agent = repository / "agent" / "config.pbtxt"
    agent.write_text(agent.read_text().replace('string_value: "True"', 'string_value: "false"'))
    # Codex's first prompt is long, and said back whole.
    room = Override("tensorrt_llm", "max_sequence_tokens", "100000")
    return replace(server, overrides=(*server.overrides, room))


def write(directory: Path, source: str, parameters: dict[str, str]) -> None:
    """Write a pipeline and its ``config.pbtxt``."""
    model = directory / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text(source)
    (directory / "config.pbtxt").write_text(config_of(model, parameters))


class Lines(RecentLines):
    """Keeps the server's log."""

    texts: ClassVar[list[str]] = []

    def log(self, line: LogLine) -> None:
        """Keep the text, too."""
        super().log(line)
        self.texts.append(line.text)


class Stream:
    """One request to a decoupled model, its responses as they come."""

    def __init__(self, server: TritonServer, model: str, **inputs: Any) -> None:
        self.client = grpcclient.InferenceServerClient(server.grpc_url)
        self.arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.model = model
        self.client.start_stream(
            lambda result, error: self.arrived.put((result, error)), stream_timeout=STREAM_S
        )
        tensors = []
        for name, value in inputs.items():
            text = isinstance(value, (str, bytes))
            data = value.encode() if isinstance(value, str) else value
            array = np.array([data], np.object_ if text else np.int32)
            tensors.append(grpcclient.InferInput(name, [1], "BYTES" if text else "INT32"))
            tensors[-1].set_data_from_numpy(array)
        self.client.async_stream_infer(model, tensors, enable_empty_final_response=True)

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                result, error = self.arrived.get(timeout=60)
            except queue.Empty:
                self.leave()
                raise AssertionError(f"waited 60 s for a response of {self.model}") from None
            if error is not None:
                self.client.stop_stream()  # a server does not end while a stream is open
                raise error
            if result.get_response().outputs:
                yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                self.client.stop_stream()
                return

    def leave(self) -> None:
        self.client.stop_stream(cancel_requests=True)


def texts(result: Any, name: str) -> list[str]:
    array = result.as_numpy(name)
    return [] if array is None else [each.decode() for each in array]


def live_requests(server: TritonServer) -> float:
    lines = httpx.get(server.metrics_url, timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith("echo_live_requests")]
    return float(found[0].rpartition(" ")[2])
