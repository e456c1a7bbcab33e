"""The played TrtllmService against software that we did not write.

``smg`` (a gateway with OpenAI's endpoints, over TrtllmService) must be able to serve from it, and
its field numbers are those that ``smg-grpc-proto`` publishes. Both are installed into virtual
environments of their own, only where ``TRTLLM_BLS_INSTALL_CLIENTS`` is set: the stubs need a newer
protobuf than tritonclient allows.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.published import pip_install
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import until
from trtllm_bls.engines.trtllm_service import service_messages as messages
from trtllm_bls.text.tokenizer import load_tokenizer

MODEL = DEMO / "target"
WORDS = "one two three, stop here and on"
FIELDS = """
import json
from smg_grpc_proto.generated import trtllm_service_pb2 as pb
print(json.dumps({
    name: {
        field.name: [field.number, field.type, field.containing_oneof.name
                     if field.containing_oneof else None]
        for field in message.fields
    }
    for name, message in pb.DESCRIPTOR.message_types_by_name.items()
}))
"""

pytestmark = pytest.mark.skipif(
    "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ,
    reason="installs packages; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it",
)


def test_the_fields_are_those_that_are_published(tmp_path: Path) -> None:
    """Name, number, type and oneof of each field that our own file has."""
    bin_ = pip_install(tmp_path / "proto", "smg-grpc-proto")
    told = subprocess.run(
        [bin_ / "python", "-c", FIELDS], capture_output=True, check=True, timeout=120
    )
    published = json.loads(told.stdout)
    for name, message in messages.MESSAGES.items():
        for field in message.DESCRIPTOR.fields:
            oneof = field.containing_oneof.name if field.containing_oneof else None
            theirs = published[name][field.name]
            if theirs[2] == f"_{field.name}":  # ``optional`` before a message says nothing
                theirs[2] = oneof
            assert [field.number, field.type, oneof] == theirs, (name, field.name)


@pytest.fixture(scope="module")
def smg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """Where smg listens, and the service behind it."""
    directory = tmp_path_factory.mktemp("smg")
    needed = ("setproctitle", "pyyaml", "grpcio", "grpcio-health-checking")
    bin_ = pip_install(directory / "venv", "smg==1.13.0", *needed)
    tokenizer = load_tokenizer(MODEL)
    engine = EchoEngine(Script(step_seconds=0.002, vocab_size=tokenizer.model_vocab_size))
    behaviour = Behaviour(
        model_id="played",
        eos_id=tokenizer.eos_id or 0,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=32_768,
        stop_ids=lambda text: tokenizer.encode(text, add_special_tokens=False, field="stop"),
    )
    port, metrics = unused_ports(2)
    with service_in_a_thread(engine, behaviour) as (service, url):
        command = [bin_ / "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics), "--policy", "round_robin"]
        command += ["--disable-retries", "--worker-urls", f"grpc://{url}", "--model-path", MODEL]
        with Child(command, name="smg"):
            address = f"http://127.0.0.1:{port}/v1"
            until(lambda: "choices" in completed(address), seconds=90)
            yield address, service


def got(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.read()
    except (urllib.error.URLError, ConnectionError) as error:
        return str(error).encode()


def completed(address: str, **more: Any) -> dict[str, Any]:
    body = {"model": "played", "prompt": WORDS, "max_tokens": 60, **more}
    answer = got(f"{address}/completions", body)
    return json.loads(answer) if answer.startswith(b"{") else {}


def test_smg_completes_from_it(smg: tuple[str, Any]) -> None:
    """Text, length, a stop string, several sequences."""
    address, _ = smg
    whole = completed(address)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (WORDS, "stop")
    assert completed(address, max_tokens=2)["choices"][0]["finish_reason"] == "length"
    stopped = completed(address, stop=["stop"])["choices"][0]
    assert (stopped["text"], stopped["matched_stop"]) == ("one two three, ", "stop")
    drawn = completed(address, n=2, temperature=0.8)["choices"]
    assert [choice["text"] for choice in drawn] == [WORDS] * 2


def test_smg_chats_from_it(smg: tuple[str, Any]) -> None:
    """Streamed; the played model says the whole conversation back."""
    address, _ = smg
    asked = {"model": "played", "messages": [{"role": "user", "content": WORDS}]}
    events = got(f"{address}/chat/completions", asked | {"max_tokens": 60, "stream": True})
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert WORDS in "".join(deltas)


def test_a_caller_of_smg_that_leaves_ends_the_work(smg: tuple[str, Any]) -> None:
    """smg sends Abort, which ends it here."""
    address, service = smg
    body = {"model": "played", "prompt": WORDS * 200, "max_tokens": 20_000, "stream": True}
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline()
    until(lambda: service.live == 0)
    assert service.aborted
