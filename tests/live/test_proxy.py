"""``deploy/nginx.conf`` before a real server: what users need goes through, all else does not.

Needs nginx. ``TRTLLM_BLS_INSTALL_NGINX=1`` has apt-get install it; otherwise the tests are skipped
where there is none.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcsync
import tritonclient.grpc.aio as grpcaio
from tritonclient.utils import InferenceServerException

from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.server_requests import generate, generate_stream
from tests.helpers.server_settings import DEMO, ROOT, free_ports
from tests.helpers.waiting import in_pieces, run_async, until
from tests.helpers.watched import watched
from trtllm_bls.client import Client
from trtllm_bls.operate.tritonserver import TritonServer

ATTACKS = 200
MODELS = "/v2/models/tensorrt_llm_bls"
BODY = {"text_input": "Once", "max_tokens": 4}


@dataclass(frozen=True)
class Proxy:
    http_url: str
    grpc_url: str
    server: TritonServer


def found_nginx() -> str:
    if shutil.which("nginx") is None and os.environ.get("TRTLLM_BLS_INSTALL_NGINX"):
        subprocess.run(["apt-get", "install", "-qy", "nginx-light"], check=True, timeout=280)
    found = shutil.which("nginx")
    if found is None:
        pytest.skip("no nginx: TRTLLM_BLS_INSTALL_NGINX=1 runs it")
    return found


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The file as it is shipped, but for its four ports."""
    nginx, scratch = found_nginx(), tmp_path_factory.mktemp("nginx")
    with watched(free_ports(model=DEMO / "target", threads=1), "proxy") as server:
        http_port, grpc_port = unused_ports(2)
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        for shipped, here in (
            ("127.0.0.1:8000", server.http_url.removeprefix("http://")),
            ("127.0.0.1:8001", server.grpc_url),
            ("listen 8080", f"listen 127.0.0.1:{http_port}"),
            ("listen 8081", f"listen 127.0.0.1:{grpc_port}"),
            ("\nhttp {", f"\nhttp {{ access_log off; client_body_temp_path {scratch}/bodies;"),
        ):
            assert text.count(shipped) == 1
            text = text.replace(shipped, here)
        (scratch / "nginx.conf").write_text(text)
        order = f"daemon off; pid {scratch}/pid; error_log {scratch}/errors;"
        if os.geteuid() == 0:
            order += " user root;"
        process = Child([nginx, "-p", str(scratch), "-c", "nginx.conf", "-g", order], "nginx")
        made = Proxy(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", server)
        try:
            until(lambda: status(made, "/v2/health/ready") == 200)
            yield made
        finally:
            process.terminate()


def status(proxy: Proxy, path: str, body: bytes | None = None, **headers: str) -> int:
    """Of a GET, or of a POST where there is a body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{proxy.http_url}{path}", data=body, headers=named)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:  # not up yet, or the connection was closed while the body was on its way
        return 0


def answered(proxy: Proxy, path: str, body: bytes | None = None, **headers: str) -> int:
    """The status. Who refuses a body unread may close before its answer is read: asked again."""
    return until(lambda: status(proxy, path, body, **headers))


def test_text_goes_through_over_http(proxy: Proxy) -> None:
    """Whole and streamed, from both text models."""
    direct = generate(proxy.server.http_url, **BODY)["text_output"]
    assert generate(proxy.http_url, **BODY)["text_output"] == direct
    assert generate(proxy.http_url, "ensemble", **BODY)["text_output"] == direct
    events = in_pieces(lambda: generate_stream(proxy.http_url, **BODY), 1)
    assert "".join(event["text_output"] for event in events) == direct


async def test_text_goes_through_over_grpc(proxy: Proxy) -> None:
    """Streamed, and several requests at once."""
    async with Client(proxy.grpc_url) as client:
        results = await asyncio.gather(
            *(client.generate(text_input="Once", max_tokens=4) for _ in range(4))
        )
    direct = generate(proxy.server.http_url, **BODY)["text_output"]
    assert {result.text for result in results} == {direct}


def test_what_is_not_for_users_does_not(proxy: Proxy) -> None:
    """Control APIs, other models, statistics, metrics, other methods."""
    for path in (
        "/v2/systemsharedmemory/status",
        "/v2/repository/index",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/tensorrt_llm/ready",
        "/v2/models/stats",
        f"{MODELS}/config",
        f"{MODELS}/stats",
        "/metrics",
        "/v2",
        "/",
    ):
        assert answered(proxy, path) == 404, path
    body = json.dumps(BODY).encode()
    json_type = "application/json"
    assert answered(proxy, "/v2/models/tensorrt_llm/generate", body, Content_Type=json_type) == 404
    assert answered(proxy, f"{MODELS}/infer", body, Content_Type=json_type) == 404
    assert answered(proxy, f"{MODELS}/generate") == 403
    assert answered(proxy, "/v2/health/ready", b"{}", Content_Type=json_type) == 403


def test_bodies_that_would_end_the_server_do_not_reach_it(proxy: Proxy) -> None:
    """Forms, large bodies, packed ones."""
    process = proxy.server.process
    form, plain = "application/x-www-form-urlencoded", "application/json"
    large = b"a" * 5_000_000
    for path in (f"{MODELS}/generate", "/v2/health/ready", "/nowhere"):
        assert status(proxy, path, large, Content_Type=form) in (0, 403, 404, 413, 415)
    assert answered(proxy, f"{MODELS}/generate", b"x=1", Content_Type=form) == 415
    assert status(proxy, f"{MODELS}/generate", large, Content_Type=plain) in (0, 413)
    packed = zlib.compress(json.dumps(BODY).encode())
    packing = {"Content_Type": plain, "Content_Encoding": "deflate"}
    assert answered(proxy, f"{MODELS}/generate", packed, **packing) == 415
    assert generate(proxy.http_url, **BODY)["text_output"]
    assert proxy.server.process == process


def test_other_grpc_methods_are_not_offered(proxy: Proxy) -> None:
    """A client that calls one is told so."""
    client = grpcsync.InferenceServerClient(proxy.grpc_url)
    try:
        assert client.is_server_ready()
        assert client.is_model_ready("tensorrt_llm_bls")
        for call in (
            client.get_model_repository_index,
            client.get_system_shared_memory_status,
            client.get_inference_statistics,
            client.get_log_settings,
        ):
            with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
                call()
    finally:
        client.close()


BAD: dict[str, dict[str, Any]] = {
    "tensorrt_llm_bls": {"text_input": np.array([[b"Once"]], np.object_)},
    "preprocessing": {"QUERY": np.array([[b"Once"]], np.object_)},
    "postprocessing": {
        "TOKENS_BATCH": np.zeros((1, 1, 2), np.int32),
        "SEQUENCE_LENGTH": np.array([[9]], np.int32),
    },
    "ensemble": {"text_input": np.array([[b"Once"]], np.object_)},
}


@pytest.mark.parametrize("model", BAD)
def test_the_header_that_ends_the_server_is_taken_away(proxy: Proxy, model: str) -> None:
    """Sent to the server itself, a few of these requests are enough, whichever model is asked."""
    process = proxy.server.process
    assert run_async(attack(proxy.grpc_url, model)) == ATTACKS
    assert generate(proxy.http_url, **BODY)["text_output"]
    assert proxy.server.process == process


async def attack(url: str, model: str) -> int:
    """How many bad requests were answered with an error, on a stream that stays open."""
    inputs = []
    for name, array in BAD[model].items():
        inputs.append(
            grpcaio.InferInput(
                name, list(array.shape), "BYTES" if array.dtype == np.object_ else "INT32"
            )
        )
        inputs[-1].set_data_from_numpy(array)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    refused = 0
    async with grpcaio.InferenceServerClient(url) as client:
        for _ in range(ATTACKS):
            with suppress(grpc.RpcError):
                answers = client.stream_infer(requests(), headers={"triton_grpc_error": "true"})
                refused += [error is not None async for _, error in answers].count(True)
    return refused
