"""What a server keeps from those who can reach it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as grpcaio
import trustme
from click.testing import CliRunner

from tests.helpers.server_requests import generate
from tests.helpers.server_settings import DEMO, free_ports
from trtllm_bls.cli import main
from trtllm_bls.client import Client, Tls
from trtllm_bls.errors import ClientError
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import Override

ATTACKS = 200


@dataclass(frozen=True)
class Files:
    """One authority, and what it has issued to a client."""

    ca: Path
    cert: Path
    key: Path

    @property
    def tls(self) -> Tls:
        return tls_of(self.ca, self)


def tls_of(ca: Path, own: Files | None = None) -> Tls:
    if own is None:
        return Tls(root_certificates=ca)
    return Tls(root_certificates=ca, private_key=own.key, certificate_chain=own.cert)


def issued(directory: Path, authority: trustme.CA, name: str) -> Files:
    directory.mkdir(exist_ok=True)
    made = Files(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")
    leaf = authority.issue_cert(name)
    authority.cert_pem.write_to_path(str(made.ca))
    leaf.cert_chain_pems[0].write_to_path(str(made.cert))
    leaf.private_key_pem.write_to_path(str(made.key))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    return {
        # Under the name by which clients know it, which is not where its own models find it.
        "server": issued(directory, authority, "localhost"),
        "client": issued(directory, authority, "client"),
        "models": issued(directory, authority, "models"),
        "stranger": issued(directory / "other", trustme.CA(), "stranger"),
    }


@pytest.fixture(scope="module")
def guarded(files: dict[str, Files]) -> Iterator[TritonServer]:
    """TLS in both directions, also between the orchestrator and its engine."""
    own = files["models"]
    settings = free_ports(
        model=DEMO / "target",
        threads=1,
        tls_cert=files["server"].cert,
        tls_key=files["server"].key,
        tls_client_ca=files["server"].ca,
        overrides=(
            Override("tensorrt_llm_bls", "engine_transport", "grpc"),
            Override("tensorrt_llm_bls", "engine_tls_cert", str(own.cert)),
            Override("tensorrt_llm_bls", "engine_tls_key", str(own.key)),
        ),
    )
    with TritonServer(settings) as running:
        yield running


def ask(url: str, tls: Tls | None) -> str:
    async def run() -> str:
        async with Client(url.replace("127.0.0.1", "localhost"), tls=tls) as client:
            return (await client.generate(text_input="Once", max_tokens=4)).text

    return asyncio.run(run())


def test_who_shows_a_certificate_is_served(guarded: TritonServer, files: dict[str, Files]) -> None:
    """Through the orchestrator, which shows one of its own to the engine's port."""
    assert ask(guarded.grpc_url, files["client"].tls)


def test_who_shows_none_or_anothers_is_not(guarded: TritonServer, files: dict[str, Files]) -> None:
    """In the clear, without a certificate, or with one of another authority."""
    stranger, ca = files["stranger"], files["client"].ca
    for tls in (None, tls_of(ca), tls_of(ca, stranger)):
        with pytest.raises(ClientError):
            ask(guarded.grpc_url, tls)


def test_the_server_is_watched_over_tls(guarded: TritonServer, files: dict[str, Files]) -> None:
    """By the launcher, which shows the models' certificate, and by ``trtllm-bls health``."""

    async def ask() -> tuple[tuple[str, ...], str]:
        probe = guarded.probe()
        assert probe is not None
        async with probe:
            return (
                await probe.models_not_ready(guarded.models, 30),
                (await probe.canary(30)).outcome,
            )

    assert asyncio.run(ask()) == ((), "answered")
    url, own = guarded.grpc_url.replace("127.0.0.1", "localhost"), files["client"]
    words = ["health", "--url", url, "--timeout", "30"]
    assert CliRunner().invoke(main, [*words[:-1], "2"]).exit_code == 1
    words += ["--ssl", "--root-certificates", str(own.ca), "--private-key", str(own.key)]
    told = CliRunner().invoke(main, [*words, "--certificate-chain", str(own.cert)])
    assert (told.exit_code, told.output) == (0, "ready\n")


def test_http_stays_on_this_machine(guarded: TritonServer) -> None:
    """Triton's HTTP port knows no TLS: a proxy beside it does."""
    assert guarded.http_url.startswith("http://127.0.0.1:")
    assert generate(guarded.http_url, text_input="Once", max_tokens=4)["text_output"]


BAD: dict[str, dict[str, Any]] = {
    "tensorrt_llm_bls": {
        "text_input": np.array([[b"Once"]], np.object_),
        "max_tokens": np.array([[4]], np.int32),
        "top_p": np.array([[2]], np.float32),
    },
    "tensorrt_llm": {
        "input_ids": np.array([[5, 6]], np.int32),
        "input_lengths": np.array([[99]], np.int32),
        "request_output_len": np.array([[4]], np.int32),
    },
}


@pytest.mark.skipif(
    "TRTLLM_BLS_ATTACK" not in os.environ,
    reason="known to fail on contended cores (docs/security.md); set TRTLLM_BLS_ATTACK=1",
)
@pytest.mark.parametrize("model", BAD)
def test_errors_as_grpc_status_leave_the_server_up(
    guarded: TritonServer, files: dict[str, Files], model: str
) -> None:
    """In Triton 24.10 whatever a model sends behind an error that closes the stream is fatal."""
    pid = guarded.pid
    asyncio.run(attack(guarded.grpc_url, files["client"], model))
    assert ask(guarded.grpc_url, files["client"].tls)
    assert guarded.pid == pid


async def attack(url: str, client: Files, model: str) -> None:
    inputs = []
    for name, array in BAD[model].items():
        kind = {"O": "BYTES", "i": "INT32", "f": "FP32"}[array.dtype.kind]
        inputs.append(grpcaio.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    async with grpcaio.InferenceServerClient(
        url.replace("127.0.0.1", "localhost"),
        ssl=True,
        root_certificates=str(client.ca),
        private_key=str(client.key),
        certificate_chain=str(client.cert),
    ) as client_of_triton:
        for _ in range(ATTACKS):
            answers = client_of_triton.stream_infer(
                requests(), headers={"triton_grpc_error": "true"}
            )
            with pytest.raises(grpc.RpcError) as raised:
                async for _ in answers:
                    raise AssertionError("an answer instead of an error")
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
