"""What is sent and what is collected, on the same wire; addresses and TLS."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.helpers.command_scenes import stopped_by_request
from tests.helpers.fake_grpc_server import FakeGrpcServer, inputs_of, text
from trtllm_bls.client import Client, Tls
from trtllm_bls.errors import ConnectionFailed, InvalidRequest, SettingsError
from trtllm_bls.wire.contract import ENGINE

ASK = {"text_input": "Hi", "max_tokens": 4}


async def test_a_result_collects_every_sequence() -> None:
    """Interleaved sequences are joined by their indices; the first one is the plain answer."""
    script = [
        text("a", sequence_index=np.int32(0)),
        text("x", sequence_index=np.int32(1)),
        text("é", sequence_index=np.int32(0), finish_reason="length"),
        text("y", sequence_index=np.int32(1), finish_reason="stop", final=True),
    ]
    async with FakeGrpcServer(script) as server, Client(server.url) as client:
        result = await client.generate(**ASK, num_return_sequences=2)
    assert result.texts == {(0, 0): "aé", (0, 1): "xy"}
    assert (result.text, result.finish_reason) == ("aé", "length")
    assert result.started_at <= result.events[0].received_at


async def test_a_request_says_what_was_given_and_nothing_else() -> None:
    """Streaming is asked for by default, a chosen model, id and outputs reach the wire."""
    async with FakeGrpcServer([text("Hi", final=True)]) as server, Client(server.url) as client:
        await client.generate("ensemble", **ASK, request_id="7", outputs=["text_output"])
        await client.generate(**ASK, stream=False, temperature=None)
    first, second = server.asked
    assert (first.model_name, first.id) == ("ensemble", "7")
    assert [output.name for output in first.outputs] == ["text_output"]
    assert inputs_of(first) == {"text_input": [["Hi"]], "max_tokens": [[4]], "stream": [[True]]}
    assert (second.model_name, inputs_of(second)["stream"]) == ("tensorrt_llm_bls", [[False]])
    assert "temperature" not in inputs_of(second)
    assert second.id not in ("", first.id)


async def test_a_proxy_does_not_come_before_a_server_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC would send the connection to the proxy, which knows another localhost."""
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with FakeGrpcServer([text("Hi", final=True)]) as server, Client(server.url) as client:
        assert (await client.generate(**ASK)).text == "Hi"


async def test_a_stop_request_ends_the_running_request_by_its_id() -> None:
    """The engine answers the stop with an empty final, the request with what it has."""
    model = replace(ENGINE, name="target")
    ask = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 9}
    async with FakeGrpcServer(stopped_by_request()) as server, Client(server.url) as client:
        stream = client.stream(model, **ask)
        first = await anext(stream)
        await client.stop(stream.request_id, model)
        rest = [event async for event in stream]
    assert [event.outputs["output_ids"].tolist() for event in (first, *rest)] == [[[[5]]], [[[6]]]]
    assert [request.model_name for request in server.asked] == ["target", "target"]
    assert server.asked[0].id == server.asked[1].id


async def test_a_field_that_cannot_be_sent_is_refused_before_sending() -> None:
    """The call itself raises, so that nothing was sent and nothing is to be closed."""
    async with FakeGrpcServer([]) as server, Client(server.url) as client:
        with pytest.raises(InvalidRequest, match="max_tokens: 'many'"):
            client.stream(text_input="Hi", max_tokens="many")
    assert server.asked == []


def test_an_address_with_a_scheme_is_refused() -> None:
    """``http://`` in front of a gRPC address would be looked up as a host name."""
    with pytest.raises(SettingsError, match="host:port"):
        Client("http://127.0.0.1:8001")


async def test_both_sides_of_a_tls_connection_show_their_certificate(tmp_path: Path) -> None:
    """All three files are used; without them the server is not reached."""
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", *kind, *name, "-keyout", str(key), "-out", str(chain)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    pair = [(key.read_bytes(), chain.read_bytes())]
    credentials = grpc.ssl_server_credentials(pair, chain.read_bytes(), True)
    tls = Tls(root_certificates=chain, private_key=key, certificate_chain=chain)
    async with FakeGrpcServer([text("Hi", final=True)], credentials) as server:
        async with Client(server.url, tls=tls) as client:
            assert (await client.generate(**ASK)).text == "Hi"
        async with Client(server.url) as client:
            with pytest.raises(ConnectionFailed):
                await client.generate(**ASK)
    assert len(server.asked) == 1
    with pytest.raises(SettingsError, match="private key: cannot read"):
        Client("127.0.0.1:8001", tls=Tls(private_key=tmp_path / "none.pem"))
