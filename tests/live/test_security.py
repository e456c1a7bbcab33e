"""What a server keeps from those who can reach it."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
import trustme
from click.testing import CliRunner

from tests.helpers.ports import unused_ports
from tests.helpers.served import Served, good
from tests.helpers.server_requests import metric
from tests.helpers.server_settings import DEMO
from tests.helpers.waiting import in_pieces, run_async, until
from tests.helpers.watched import watched
from tests.live.conftest import echo_repository, echo_settings
from trtllm_bls.cli import main
from trtllm_bls.client import Client, Tls
from trtllm_bls.errors import ClientError, SetupError
from trtllm_bls.operate.http_process import HttpProcess
from trtllm_bls.operate.tritonserver import TritonServer
from trtllm_bls.settings.command_options import Override, ServeSettings

WORDS = "one two three four five"
ASKED: dict[str, Any] = {"text_input": WORDS, "max_tokens": 40}


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
def guarded(
    files: dict[str, Files], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """TLS in both directions, also between the orchestrator and its engine, which is a script."""
    settings, own = echo_settings(tmp_path_factory.mktemp("echo")), files["models"]
    shown = (
        Override("tensorrt_llm_bls", "engine_tls_cert", str(own.cert)),
        Override("tensorrt_llm_bls", "engine_tls_key", str(own.key)),
    )
    settings = replace(
        settings,
        tls_cert=files["server"].cert,
        tls_key=files["server"].key,
        tls_client_ca=files["server"].ca,
        overrides=(*settings.overrides, *shown),
    )
    with watched(settings, "guarded") as running:
        yield running


def https(url: str, files: Files | None, **body: Any) -> Any:
    """An open answer of ``tensorrt_llm_bls``, to who shows the certificate of ``files``."""
    context = ssl.create_default_context(cafile=files and files.ca)
    if files is not None:
        context.load_cert_chain(files.cert, files.key)
    url = f"{url.replace('127.0.0.1', 'localhost')}/v2/models/tensorrt_llm_bls/generate"
    url += "_stream" if body.get("stream") else ""
    kind = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), kind)
    return urllib.request.urlopen(asked, timeout=60, context=context)


def ask(url: str, tls: Tls | None) -> str:
    async def run() -> str:
        async with Client(url.replace("127.0.0.1", "localhost"), tls=tls) as client:
            return (await client.generate(text_input="Once", max_tokens=4)).text

    return run_async(run())


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

    assert run_async(ask()) == ((), "answered")
    url, own = guarded.grpc_url.replace("127.0.0.1", "localhost"), files["client"]
    words = ["health", "--url", url, "--timeout", "30"]
    assert CliRunner().invoke(main, [*words[:-1], "2"]).exit_code == 1
    words += ["--tls-ca", str(own.ca), "--tls-key", str(own.key)]
    told = CliRunner().invoke(main, [*words, "--tls-cert", str(own.cert)])
    assert (told.exit_code, told.output) == (0, "ready\n")


@pytest.fixture(scope="module")
def https_url(
    guarded: TritonServer, files: dict[str, Files], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Where ``serve`` answers Triton's HTTP API in front of ``guarded``."""
    (port,) = unused_ports(1)
    settings = replace(guarded.settings, http_port=port, openai_port=0)
    in_front = SimpleNamespace(
        **{
            name: getattr(guarded, name)
            for name in ("grpc_url", "http_url", "metrics_url", "host", "repository", "workdir")
        },
        environment=guarded.environment,
        settings=settings,
        public_http_url=f"https://127.0.0.1:{port}",
        stop_requested=False,
        running=True,
    )
    told: list[str] = []
    process = HttpProcess(cast(TritonServer, in_front), False, told.append, told.append)
    try:
        process.start()
        yield in_front.public_http_url
    finally:
        process.close()


def test_https_answers_who_shows_a_certificate(https_url: str, files: dict[str, Files]) -> None:
    """In one piece and as a stream; curl too."""
    with https(https_url, files["client"], **ASKED) as answer:
        assert json.load(answer)["text_output"] == WORDS

    def events() -> list[Any]:
        with https(https_url, files["client"], **ASKED, stream=True) as answer:
            found = [json.loads(line[6:]) for line in answer.read().splitlines() if line]
        assert "".join(event["text_output"] for event in found) == WORDS
        return found

    in_pieces(events, 3)
    own = files["client"]
    url = f"{https_url.replace('127.0.0.1', 'localhost')}/v2/health/ready"
    words = ["curl", "-si", "--cacert", own.ca, "--cert", own.cert, "--key", own.key, url]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.startswith("HTTP/1.1 200")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_https_refuses_who_shows_none(
    https_url: str, files: dict[str, Files], version: ssl.TLSVersion
) -> None:
    """By TLS, before any request is read: in TLS 1.2 the handshake fails, in 1.3 the client's side
    of it has ended by then. asyncio closes without the alert that would say why."""
    host, _, port = https_url.removeprefix("https://").partition(":")
    context = ssl.create_default_context(cafile=files["client"].ca)
    context.maximum_version = version
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
        context.wrap_socket(
            plain, server_hostname="localhost", suppress_ragged_eofs=False
        ) as connection,
    ):
        assert version is not ssl.TLSVersion.TLSv1_2
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.recv(1)


def test_who_leaves_over_https_ends_the_engines_work(
    guarded: TritonServer, https_url: str, files: dict[str, Files]
) -> None:
    """As soon as it is gone."""
    asked = {"text_input": WORDS * 20, "max_tokens": 40_000, "end_id": -1, "stream": True}
    until(lambda: metric(guarded.metrics_url, "echo_live_requests") == 0)
    before = metric(guarded.metrics_url, "echo_tokens")
    with https(https_url, files["client"], **asked) as answer:
        assert answer.readline().startswith(b"data: ")
    until(lambda: metric(guarded.metrics_url, "echo_live_requests") == 0)
    assert metric(guarded.metrics_url, "echo_tokens") - before < 40_000


def test_a_server_that_does_not_start_leaves_no_port_behind(files: dict[str, Files]) -> None:
    """Whichever of its ports is taken, its option is named."""
    own = files["server"]
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = (free.getsockname()[1], taken.getsockname()[1])
        free.close()
        for http, grpc, name in ((*ports, "grpc"), (*ports[::-1], "http")):
            settings = ServeSettings(
                http_port=http, grpc_port=grpc, metrics_port=0, tls_cert=own.cert, tls_key=own.key
            )
            with pytest.raises(SetupError, match=rf"port {ports[1]} on .*--{name}-port"):
                TritonServer(settings, behind_http=True).start()
            socket.create_server(("127.0.0.1", ports[0])).close()


@pytest.mark.slow
def test_serve_speaks_https_alone_and_is_found_again_after_a_restart(
    files: dict[str, Files], tmp_path: Path
) -> None:
    """To users of Triton's HTTP and of the OpenAI API, on the ports that were asked for; the lines
    that it prints work as they are."""
    (port,) = unused_ports(1)
    own = files["server"]
    running = Served(
        echo_repository(tmp_path), "--model", str(DEMO / "target"), "--openai-port", str(port),
        "--tls-cert", str(own.cert), "--tls-key", str(own.key),
    )  # fmt: skip
    try:
        curl, urls = running.curl, running.urls
        assert urls["OpenAI"] == f"https://127.0.0.1:{port}/v1"
        told = subprocess.run(
            curl, shell=True, capture_output=True, text=True, check=True, timeout=120
        )
        assert "12 * 9" in json.loads(told.stdout)["choices"][0]["message"]["content"]
        running.server.kill()
        running.wait_for_line("serving again")
        assert good(urls["health"])["ok"]
        with https(urls["HTTP"], files["client"], **ASKED) as answer:
            assert json.load(answer)["text_output"] == WORDS
        chat(urls["OpenAI"], own)
        running.process.terminate()
        assert running.end()[0] == 0
    finally:
        running.process.kill()
        running.process.wait(60)


def chat(url: str, files: Files) -> None:
    """One question by OpenAI's own client, which the scripted engine repeats."""
    context = ssl.create_default_context(cafile=files.ca)
    url = url.replace("127.0.0.1", "localhost")
    with openai.OpenAI(
        base_url=url, api_key="any", http_client=openai.DefaultHttpxClient(verify=context)
    ) as client:
        question: Any = [{"role": "user", "content": "What is 12 * 9?"}]
        answer = client.chat.completions.create(model="target", messages=question, stream=True)
        assert "12 * 9" in "".join(chunk.choices[0].delta.content or "" for chunk in answer)
