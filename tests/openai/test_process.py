"""``trtllm-bls openai`` as a process: workers, HTTPS, keys, signals; and old HTTP clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import trustme
from click.testing import CliRunner

from tests.helpers.children import Child
from tests.helpers.openai_server import MODEL
from tests.helpers.packages import import_or_skip
from tests.helpers.scripted_text import PROMPT
from tests.helpers.small_tokenizers import directory
from tests.helpers.waiting import until, until_ended
from tests.openai.conftest import Connect
from trtllm_bls.cli import main
from trtllm_bls.openai.sockets import socket_protocol
from trtllm_bls.orchestrator.status import StatusDirectory

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@contextmanager
def openai_over_https(authority: trustme.CA, scratch: Path, workers: int) -> Iterator[Child]:
    """Run ``openai`` with HTTPS in both directions and a key; its engine cannot be reached."""
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(scratch / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(scratch / "cert.pem"))
    authority.cert_pem.write_to_path(str(scratch / "ca.pem"))
    (scratch / "keys").write_text("mine\n")
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--workers", str(workers)]
    command += ["--tokenizer-dir", str(directory("byte-level")), "--engine-url", NOWHERE]
    command += ["--served-model-name", MODEL, "--api-keys-file", str(scratch / "keys")]
    command += ["--tls-cert", str(scratch / "cert.pem")]
    command += ["--tls-key", str(scratch / "key.pem")]
    command += ["--tls-client-ca", str(scratch / "ca.pem")]
    with Child(command, name="openai") as running:
        yield running


@pytest.fixture(scope="module")
def https_url(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with openai_over_https(authority, tmp_path_factory.mktemp("process"), 1) as running:
        yield url_of(running)
        assert running.terminate() == 0


def url_of(running: Child) -> str:
    """Return the address that the first line tells."""
    return running.output.next().split()[-1].removesuffix("/v1")


def get(url: str, authority: trustme.CA, issuer: trustme.CA | None = None, **headers: str) -> int:
    """The status; who asks shows a certificate of ``issuer``, or of ``authority``."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    (issuer or authority).issue_cert("client").configure_cert(context)
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_workers_answer_over_https_to_who_has_a_key(authority: trustme.CA, tmp_path: Path) -> None:
    """An engine that cannot be reached is unhealthy, and nothing worse. SIGTERM ends all, with exit
    code 0; the request without a key is reported, the probes' requests are not."""
    with openai_over_https(authority, tmp_path, 2) as running:
        url = url_of(running)
        assert url.startswith("https://")
        assert get(f"{url}/v1/models", authority) == 401
        assert get(f"{url}/v1/models", authority, Authorization="Bearer mine") == 200
        assert get(f"{url}/health", authority) == 503
        assert get(f"{url}/metrics", authority) == 200
        supervisor = psutil.Process(running.pid)
        workers = supervisor.children()
        assert supervisor.num_threads() == 1  # a fork would not have the others
        # One that held another's end of the supervisor's pipe would keep its death from being seen.
        one, other = (set(sockets_of(worker)) for worker in workers)
        assert len(one & other) == len(supervisor.net_connections())  # both listen at the same ones
        assert running.terminate() == 0
        until_ended(workers)
        (line,) = (line for line in running.errors if "request id=" in line)
        assert "outcome=refused reason=authorization" in line


async def test_websockets_come_through_tls_with_a_key(
    https_url: str, authority: trustme.CA
) -> None:
    """The client has one thread: two must not read and write one TLS connection at once, as the
    package's other client does, of whose handshakes 1 in 1,000 hangs on a busy machine."""
    client = import_or_skip("websockets.asyncio.client")
    if socket_protocol() == "none":
        pytest.skip("uvicorn limits no message of a WebSocket: `pip install wsproto` runs it")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    authority.issue_cert("client").configure_cert(context)
    url = https_url.replace("https://", "wss://") + "/v1/responses"
    headers = {"authorization": "Bearer mine"}
    async with client.connect(url, ssl=context, additional_headers=headers) as connection:
        await connection.send('{"type": "session.update"}')  # which is no request, and in no log
        told = json.loads(await asyncio.wait_for(connection.recv(), 60))
        assert (told["type"], told["status"]) == ("error", 400)


def sockets_of(process: psutil.Process) -> Iterator[str]:
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if (target := str(descriptor.readlink())).startswith("socket:"):
                yield target


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("issuer", [None, trustme.CA()])
def test_who_shows_no_certificate_of_the_authority_is_refused_by_tls(
    https_url: str,
    authority: trustme.CA,
    version: ssl.TLSVersion,
    issuer: trustme.CA | None,
) -> None:
    """Before any request is read: in TLS 1.2 the handshake fails, in 1.3 the client's side of it
    has ended by then. The next request of who shows one is answered."""
    context = ssl.create_default_context()
    context.maximum_version = version
    authority.configure_trust(context)
    if issuer is not None:
        issuer.issue_cert("client").configure_cert(context)
    address = urlsplit(https_url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=60) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
        context.wrap_socket(
            plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False
        ) as connection,
    ):
        assert version is not ssl.TLSVersion.TLSv1_2
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        connection.recv(1)
    assert get(f"{https_url}/metrics", authority) == 200


def test_who_speaks_plain_http_is_not_answered(https_url: str, authority: trustme.CA) -> None:
    """Not even a probe; the next request is."""
    with pytest.raises(OSError):
        get(f"{https_url.replace('https', 'http')}/health", authority)
    assert get(f"{https_url}/metrics", authority) == 200


def status_of(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=120
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def workers_of(running: Child) -> list[psutil.Process]:
    workers = []
    for child in psutil.Process(running.pid).children():
        with suppress(psutil.NoSuchProcess):  # it may end between the two looks
            if child.status() != psutil.STATUS_ZOMBIE:
                workers.append(child)
    return workers


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_workers_answer_without_https(number: int) -> None:
    """Under the names that are allowed; both signals end all with exit code 0."""
    workers = "1" if number == signal.SIGINT else "2"
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--workers", workers]
    command += ["--tokenizer-dir", str(directory("byte-level")), "--engine-url", NOWHERE]
    command += ["--allowed-host", "api.example", "--allowed-host", "other.example"]
    with Child(command, name="openai") as running:
        url = url_of(running)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=120) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/health", timeout=120)
        refused.value.close()
        assert refused.value.code == 503
        for name, status in (("api.example", 200), ("evil.example", 421)):
            assert status_of(f"{url}/v1/models", host=name) == status
        if workers == "2":
            # One that dies is replaced, and the other answers meanwhile.
            first, *_ = workers_of(running)
            first.kill()
            assert status_of(f"{url}/v1/models") == 200
            until(lambda: first not in workers_of(running) and len(workers_of(running)) == 2)
        running.process.send_signal(number)
        assert running.end() == 0


def test_an_application_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    """With one line that says why, exit code 1, and no worker started."""
    (tmp_path / "tokenizer.json").write_text("{}")
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--tokenizer-dir", str(tmp_path), "--engine-url", NOWHERE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"error: {tmp_path}: cannot be loaded as a tokenizer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_certificate_that_cannot_be_read_ends_the_server(tmp_path: Path) -> None:
    """In the same way."""
    (tmp_path / "broken.pem").write_text("no certificate")
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--tokenizer-dir", str(directory("byte-level")), "--engine-url", NOWHERE]
    command += ["--tls-cert", str(tmp_path / "broken.pem")]
    command += ["--tls-key", str(tmp_path / "broken.pem")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: the API did not start: [SSL]" in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    """Nobody would take connections for them any more. No file of any of them is left."""
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--tokenizer-dir", str(directory("byte-level")), "--engine-url", NOWHERE]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with Child(command, name="openai", env=environment) as running:
        url = url_of(running)
        for path in ("/v1/models", "/metrics"):
            with urllib.request.urlopen(f"{url}{path}", timeout=120):
                children = psutil.Process(running.pid).children(recursive=True)
    until_ended(children)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("allowed", [32, 128, 511])
def test_too_few_open_files_are_told_before_a_client_comes(allowed: int) -> None:
    """Each connection would be reset without a word."""
    command = ["bash", "-c", f'ulimit -n {allowed}; exec "$@"', "-", sys.executable]
    command += ["-m", "trtllm_bls.cli", "openai", "--port", "0", "--engine-url", NOWHERE]
    command += ["--tokenizer-dir", str(directory("byte-level"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: only {allowed} files may be open (ulimit -Hn), 512 are needed")


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    """That says which, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", str(port)]
        command += ["--tokenizer-dir", str(directory("byte-level"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: port {port} on 127.0.0.1: address already in use;")


def exchange(api_port: int, data: bytes, end: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", api_port), timeout=60) as raw:
        raw.sendall(data)
        read = b""
        while not read.endswith(end):
            part = raw.recv(65536)
            if not part:
                break
            read += part
    return read


def test_old_and_careful_clients_are_answered(connect: Connect) -> None:
    """HTTP/1.0 has no chunks, Expect asks before it sends, and a connection serves again."""
    api, _ = connect()
    body = b'{"model": "%s", "prompt": "%s", "stream": true}' % (MODEL.encode(), PROMPT.encode())
    head = b"POST /v1/completions HTTP/1.%d\r\nhost: x\r\ncontent-length: %d\r\n%s"
    head += b"content-type: application/json\r\n\r\n"
    old = exchange(api.port, head % (0, len(body), b"") + body, b"never")
    assert old.endswith(b"data: [DONE]\n\n")
    careful = head % (1, len(body), b"expect: 100-continue\r\n")
    assert exchange(api.port, careful, b"\r\n\r\n").startswith(b"HTTP/1.1 100 Continue")
    with socket.create_connection(("127.0.0.1", api.port), timeout=60) as raw:
        for _ in range(3):
            raw.sendall(head % (1, len(body), b"") + body)
            read = b""
            while not read.endswith(b"0\r\n\r\n"):
                part = raw.recv(65536)
                assert part, "closed in the middle of an answer"
                read += part
            assert b"[DONE]" in read


def test_who_starts_on_the_directory_of_a_drained_server_is_not_drained(tmp_path: Path) -> None:
    """A container that is started again finds what the one before left in its volume."""
    command = [sys.executable, "-m", "trtllm_bls.cli", "openai", "--port", "0"]
    command += ["--tokenizer-dir", str(directory("byte-level")), "--engine-url", NOWHERE]
    command += ["--status-dir", str(tmp_path / "status"), "--workers", "2"]
    files = StatusDirectory(tmp_path / "status")
    for _ in range(2):
        with Child(command, name="openai") as running:
            assert running.output.next()
            until(lambda: sum(status.loop_at > 0 for status in files.read()) == 2)
            assert files.drain_deadline() is None
            assert not any(status.handed_over for status in files.read())
            drained = CliRunner().invoke(main, ["drain", "--dir", str(files.path)])
            assert drained.exit_code == 0, drained.output
            assert running.terminate() == 0
            assert "draining" in running.errors.rest()
