"""The certificates of ``serve``: who is asked with them, and which ports have them."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import trustme
from click.testing import CliRunner

from tests.helpers.fake_grpc_server import FakeGrpcServer, text
from tests.helpers.ports import unused_ports
from tests.helpers.waiting import run_async
from trtllm_bls.cli import main
from trtllm_bls.client import Tls
from trtllm_bls.errors import SettingsError, SetupError
from trtllm_bls.operate.health import Probe, look
from trtllm_bls.operate.ports import choose, own_tls
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings
from trtllm_bls.settings.engine_tls import trusting

SECONDS = 20
TOKEN = text("x", final=True)


def issued(directory: Path, authority: trustme.CA, name: str) -> tuple[Path, Path]:
    """Files of a certificate for ``name`` and of its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    leaf = authority.issue_cert(name)
    leaf.cert_chain_pems[0].write_to_path(str(cert))
    leaf.private_key_pem.write_to_path(str(key))
    return cert, key


def credentials(cert: Path, key: Path, clients_of: trustme.CA | None = None) -> Any:
    root = clients_of and clients_of.cert_pem.bytes()
    pair = (key.read_bytes(), cert.read_bytes())
    return grpc.ssl_server_credentials([pair], root, require_client_auth=root is not None)


@pytest.mark.parametrize("name", ["gpu.example.com", "*.example.com", "127.0.0.1", "10.0.0.7"])
def test_the_server_is_known_by_its_certificate(tmp_path: Path, name: str) -> None:
    """Whatever names are in it: the address that the server listens at is another matter."""
    cert, key = issued(tmp_path, trustme.CA(), name)
    tls = own_tls(ServeSettings(tls_cert=cert, tls_key=key))

    async def ask(trusted: Tls | None) -> str:
        async with (
            FakeGrpcServer([TOKEN], credentials(cert, key)) as server,
            Probe(server.url, tls=trusted) as probe,
        ):
            return (await probe.canary(5.0)).outcome

    assert run_async(ask(tls)) == "answered"
    (tmp_path / "other").mkdir()
    other, _ = issued(tmp_path / "other", trustme.CA(), name)
    assert run_async(ask(Tls(root_certificates=other, server_name=name))) == "late"


def test_a_certificate_of_the_older_form_has_its_name_in_the_subject(tmp_path: Path) -> None:
    """Among other words, such as the organisation's."""
    leaf = trustme.CA().issue_cert(common_name="gpu.example.com", organization_name="Example")
    file = tmp_path / "cert.pem"
    leaf.private_key_and_cert_chain_pem.write_to_path(str(file))
    tls = own_tls(ServeSettings(tls_cert=file, tls_key=file))
    assert tls is not None and tls.server_name == "gpu.example.com"


def test_a_server_that_asks_for_certificates_is_shown_that_of_its_models(tmp_path: Path) -> None:
    """Where there is none, nothing is asked over gRPC, rather than in vain."""
    authority = trustme.CA()
    cert, key = issued(tmp_path, authority, "127.0.0.1")
    (tmp_path / "models").mkdir()
    own_cert, own_key = issued(tmp_path / "models", authority, "models")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings = ServeSettings(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=tmp_path / "ca.pem",
        overrides=(
            Override("tensorrt_llm_bls", "engine_tls_cert", str(own_cert)),
            Override("tensorrt_llm_bls", "engine_tls_key", str(own_key)),
        ),
    )

    async def ask() -> str:
        both = credentials(cert, key, authority)
        async with (
            FakeGrpcServer([TOKEN], both) as server,
            Probe(server.url, tls=own_tls(settings)) as probe,
        ):
            return (await probe.canary(SECONDS)).outcome

    assert run_async(ask()) == "answered"
    elsewhere = ServeSettings(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=tmp_path / "ca.pem",
        engine="trtllm://127.0.0.1:1",
        model=tmp_path,
    )
    server: Any = SimpleNamespace(settings=elsewhere, grpc_url="x:1")
    assert TritonServer.probe(server) is None


def test_files_that_are_no_pair_are_refused_at_start(tmp_path: Path) -> None:
    """In one line, before any model loads."""
    cert, key = issued(tmp_path, trustme.CA(), "127.0.0.1")
    mutual = ServeSettings(
        tls_cert=cert, tls_key=key, tls_client_ca=key, engine="trtllm://x:1", model=tmp_path
    )
    with pytest.raises(SettingsError, match=r"--tls-client-ca .*key\.pem: not usable: "):
        TritonServer(mutual).start()
    key.write_text("")
    with pytest.raises(SettingsError, match=r"--tls-key .*key\.pem: not usable: "):
        TritonServer(ServeSettings(tls_cert=cert, tls_key=key)).start()
    assert own_tls(ServeSettings()) is None


def test_tritons_own_http_port_is_for_this_machine_alone() -> None:
    """At a port of its own: a program of ours answers at the one that was asked for."""
    (port,) = unused_ports(1)
    settings = ServeSettings(host="0.0.0.0", expose=True, http_port=port, grpc_port=0)
    settings = replace(settings, metrics_port=0)
    ports = choose(settings, behind_http=True)
    assert (ports.http_host, ports.http == port) == ("127.0.0.1", False)
    opened = choose(replace(settings, triton_http_port=0), behind_http=True)
    assert opened.http_host == "0.0.0.0"
    with (
        socket.create_server(("0.0.0.0", port)),
        pytest.raises(SetupError, match=f"port {port} .*--http-port"),
    ):
        choose(settings, behind_http=True)


def test_the_command_asks_over_tls(tmp_path: Path) -> None:
    """With the options that the other terminal commands have."""
    cert, key = issued(tmp_path, trustme.CA(), "127.0.0.1")

    async def ask() -> tuple[bool, bool]:
        async with FakeGrpcServer([TOKEN], credentials(cert, key)) as server:
            words = ["health", "--url", server.url, "--model", "a", "--timeout", "5"]
            plain = await look(server.url, ("a",), 5.0, canary=True)
            words += ["--tls-ca", str(cert), "--tls-server-name", "127.0.0.1"]
            told = await asyncio.to_thread(CliRunner().invoke, main, words)
            return plain.ready, told.exit_code == 0

    assert run_async(ask()) == (False, True)


def test_of_a_file_the_first_certificate_alone_is_trusted(tmp_path: Path) -> None:
    """Whatever stands before it, such as its key and words for people, and after it."""
    leaf, other = (trustme.CA().issue_cert(name) for name in ("first", "other"))
    parts = (leaf.private_key_pem, leaf.cert_chain_pems[0], other.cert_chain_pems[0])
    file = tmp_path / "all.pem"
    file.write_bytes(b"\n".join(part.bytes() for part in parts))
    tls = own_tls(ServeSettings(tls_cert=file, tls_key=file))
    assert tls is not None and tls.server_name == "first"
    file.write_bytes(b"-----BEGIN HERE-----\n" + file.read_bytes())
    assert trusting(file).cert_store_stats()["x509"] == 1
