"""A tiny model that ticks and one that does not load, for servers that are started and killed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.helpers.waiting import STREAM_S

SHARED_MEMORY = Path("/dev/shm")

CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "count" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "word" value { string_value: "tick" } }
"""

# Says its word ``count`` times, 20 ms apart; for a count of 0 it describes where it runs.
TICKER = """
import json, os, ssl, sys, threading
import numpy as np
import triton_python_backend_utils as pb
import trtllm_bls

class TritonPythonModel:
    def initialize(self, args):
        self.word = json.loads(args["model_config"])["parameters"]["word"]["string_value"]

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        count = int(pb.get_input_tensor_by_name(request, "count").as_numpy()[0])
        sender = request.get_response_sender()
        clock = threading.Event()
        for _ in range(count):
            self.say(sender, self.word)
            clock.wait(0.02)
        if count == 0:
            where = {"numpy": np.__version__, "prefix": sys.prefix, "env": dict(os.environ)}
            self.say(sender, json.dumps(where | {"package": trtllm_bls.__file__}))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def say(self, sender, text):
        said = pb.Tensor("said", np.array([text.encode()], dtype=object))
        sender.send(pb.InferenceResponse([said]))
"""

BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the tokenizer is not where it should be")
"""


def write_model(repository: Path, name: str, code: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (repository / name / "1" / "model.py").write_text(code)


def left_over(prefix: str) -> list[Path]:
    return list(SHARED_MEMORY.glob(prefix + "*"))


@contextmanager
def stream(grpc_url: str, count: int) -> Iterator[Callable[[], str | None]]:
    """Ask the ticker; yields a function that gives its next word, ``None`` after the last."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(grpc_url) as client:
        client.start_stream(
            lambda result, error: answers.put(error or result), stream_timeout=STREAM_S
        )
        wanted = grpcclient.InferInput("count", [1], "INT32")
        wanted.set_data_from_numpy(np.array([count], np.int32))
        client.async_stream_infer("ticker", [wanted], enable_empty_final_response=True)

        ended = False

        def following() -> str | None:
            nonlocal ended
            try:
                answer = answers.get(timeout=30)
            except queue.Empty:
                raise AssertionError("waited 30 s for a word of the ticker") from None
            if isinstance(answer, Exception):
                raise answer
            said = answer.as_numpy("said")
            ended = said is None
            return None if ended else str(said[0].decode())

        try:
            yield following
        finally:
            # Cancelling what has ended can leak the request in the server, which then never drains.
            client.stop_stream(cancel_requests=not ended)
