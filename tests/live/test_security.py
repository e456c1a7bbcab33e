"""What a server keeps from those who can reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

from tests.helpers.server_requests import generate
from tests.helpers.server_settings import DEMO, free_ports
from trtllm_bls.cli import main
from trtllm_bls.client import Client, Tls
from trtllm_bls.errors import ClientError
from trtllm_bls.launcher import TritonServer
from trtllm_bls.settings import Override


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
