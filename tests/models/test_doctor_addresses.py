"""What the doctor finds at the addresses that a deployment names."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from doubles.scripted import Script, ScriptedEngine
from doubles.scripted_tokens import hashed
from doubles.trtllm_service import Behaviour
from tests.helpers.scripted_services import service_in_a_thread
from tests.models.configured import Demo
from tests.models.doctored import change, findings, only
from trtllm_bls.client import Tls
from trtllm_bls.operate.findings import Subject


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Names itself, and has one model that is ready."""

    def __init__(self, name: str = "triton") -> None:
        self.name = name

    def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name=self.name)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "tensorrt_llm")

    def ModelConfig(self, request: Any, context: Any) -> Any:
        config = model_config_pb2.ModelConfig(name=request.name)
        config.parameters["gpt_model_path"].string_value = "/another/engine"
        return service_pb2.ModelConfigResponse(config=config)


@pytest.fixture
def triton() -> Iterator[tuple[FakeTriton, str]]:
    with ThreadPoolExecutor(2) as threads:
        server, fake = grpc.server(threads), FakeTriton()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield fake, f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_models_that_are_not_ready(triton: tuple[FakeTriton, str]) -> None:
    """Named one by one."""
    _, url = triton
    found = only(findings("server", url=url))
    assert "tensorrt_llm_bls is not ready" in found.summary


def test_a_server_behind_tls(tmp_path: Path) -> None:
    """It is asked with the options that every command has, and not without."""
    authority = trustme.CA()
    issued, ca = authority.issue_cert("triton.test"), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    chain = issued.cert_chain_pems[0].bytes()
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(), server)
        keys = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
        url = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', keys)}"
        server.start()
        tls = Tls(root_certificates=ca, server_name="triton.test")
        assert "tensorrt_llm_bls is not ready" in only(findings("server", url=url, tls=tls)).summary
        assert "no answer from Triton" in only(findings("server", url=url)).summary
        server.stop(None).wait()


def test_a_server_that_is_not_triton(triton: tuple[FakeTriton, str]) -> None:
    """Others speak the same protocol."""
    fake, url = triton
    fake.name = "openvino"
    assert "openvino answers" in only(findings("server", url=url)).summary


def test_a_server_of_another_repository(demo: Demo, triton: tuple[FakeTriton, str]) -> None:
    """Its models have our names and other engines."""
    demo.write()
    found = only(findings("same_repository", url=triton[1], repository=demo.out))
    assert "gpt_model_path" in found.summary


def test_nobody_answers() -> None:
    """An error in one line, not a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        found = only(findings("server", url=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert "no answer" in found.summary


def test_another_program_on_the_engines_port(demo: Demo, triton: tuple[FakeTriton, str]) -> None:
    """It is this very test, which is not called tritonserver."""
    demo.write("--engine-url", triton[1])
    assert "not tritonserver" in only(findings("engine_port", repository=demo.out)).summary


def test_engines_elsewhere(demo: Demo, triton: tuple[FakeTriton, str]) -> None:
    """Each address by itself; the port of this server does not matter then."""
    demo.write()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        change(demo, "tensorrt_llm_bls", engine=f"triton+grpc://{triton[1]}/m,{nobody}")
        assert nobody in only(findings("engine_addresses", repository=demo.out)).summary
    assert findings("engine_port", repository=demo.out) == []


def test_a_service_that_is_not_well_says_so(demo: Demo, triton: tuple[FakeTriton, str]) -> None:
    """And another server at its address is told from it."""
    demo.write()
    behaviour = Behaviour(health="NOT_OK")
    with service_in_a_thread(ScriptedEngine(hashed(6), Script()), behaviour) as (service, address):
        change(demo, "tensorrt_llm_bls", engine=f"trtllm://{address}")
        found = only(findings("engine_addresses", repository=demo.out))
        assert found.summary == f"engine at {address}: it is not healthy: NOT_OK"
        service.behaviour = Behaviour()
        assert findings("engine_addresses", repository=demo.out) == []
    change(demo, "tensorrt_llm_bls", engine=f"trtllm://{triton[1]}")
    what = only(findings("engine_addresses", repository=demo.out)).summary
    assert what.endswith("not TensorRT-LLM's service")


def test_a_port_that_serve_would_take(demo: Demo) -> None:
    """Named with its program and the option that avoids it."""
    demo.write()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        busy = only(findings("ports", repository=demo.out, ports={"--http-port": port}))
    assert f"port {port} is taken by" in busy.summary
    assert "--http-port" in busy.remedy
    assert findings("ports", repository=demo.out, ports={"--http-port": port}) == []
    assert Subject().ports["--grpc-port"] == 8001
