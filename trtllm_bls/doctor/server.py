"""Checks of addresses: who listens there, and whether it serves this repository."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

import grpc
import psutil
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from trtllm_bls.contract import BLS
from trtllm_bls.doctor.findings import Finding, Findings, check
from trtllm_bls.doctor.subject import Subject
from trtllm_bls.engines.triton.own_port import listening_processes
from trtllm_bls.engines.trtllm_service import messages
from trtllm_bls.parameters import EngineKind, parse_engine

_ANSWER_S = 5.0
_SERVER = "tritonserver"


def _engine_url(subject: Subject) -> str:
    """Where the engine of this server is; empty where another process has it."""
    return "" if _engines_elsewhere(subject) else subject.values(BLS.name).get("engine_url", "")


@check("the engine's port belongs to Triton, or to nobody yet", _engine_url)
def engine_port(subject: Subject) -> Findings:
    """With host networking another program or another Triton may own it."""
    names = _listeners(_engine_url(subject))
    if names - {_SERVER}:
        what = f"engine_url {_engine_url(subject)}: {_all(names)} listens there, not {_SERVER}"
        yield Finding("error", what, "stop it, or serve on another --grpc-port")


def _engines_elsewhere(subject: Subject) -> list[tuple[str, EngineKind]]:
    """The addresses that parameter ``engine`` names, where it is one of another process."""
    try:
        choice = parse_engine(subject.values(BLS.name).get("engine", ""))
    except ValueError:
        return []  # none, or told by the check of parameters
    return [(address, choice.kind) for address, _ in choice.addresses if choice.is_elsewhere]


@check("engines elsewhere are there", _engines_elsewhere)
def engine_addresses(subject: Subject) -> Findings:
    """Each takes a connection; TensorRT-LLM's service is asked for its health."""
    for address, kind in _engines_elsewhere(subject):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        except OSError as error:
            what = f"engine at {address}: {error.strerror or error}"
            mend = "start it (trtllm-serve MODEL --grpc), or mend the address"
            yield Finding("error", what, mend)
            continue
        problem = _service_problem(address) if kind is EngineKind.TRTLLM else ""
        if problem:
            yield Finding("error", f"engine at {address}: {problem}", "see its own log")


def _service_problem(address: str) -> str:
    """What a TrtllmService says of its health; empty where that is good, or the port has TLS."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(
            messages.SERVICE + "HealthCheck",
            request_serializer=messages.HealthCheckRequest.SerializeToString,
            response_deserializer=messages.HealthCheckResponse.FromString,
        )
        try:
            status = ask(messages.HealthCheckRequest(), timeout=_ANSWER_S).status
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            other = error.code() is grpc.StatusCode.UNIMPLEMENTED
            return "no answer" if late else "not TensorRT-LLM's service" if other else ""
    return "" if status == "OK" else f"it is not healthy: {status}"


@check("the ports of serve are free", lambda s: s.repository and not s.url)
def ports(subject: Subject) -> Findings:
    """The default ports of ``serve``; a running server has taken them already."""
    for option, port in subject.ports.items():
        names = _listeners(f"localhost:{port}")
        if names:
            what = f"port {port} is taken by {_all(names)}"
            yield Finding("warn", what, f"if that is not your server, choose another with {option}")


def _listeners(url: str) -> set[str]:
    """The names of the programs that listen at a port of this machine."""
    names = set()
    for process in listening_processes(url):
        with suppress(psutil.Error):
            names.add(psutil.Process(process).name())
    return names


def _all(names: set[str]) -> str:
    return " and ".join(sorted(names))


@check("the server answers and its models are ready", lambda s: s.url)
def server(subject: Subject) -> Findings:
    """Triton, live, with every model of the repository (or tensorrt_llm_bls and its engine)."""
    with _client(subject) as client:
        try:
            name = client.get_server_metadata(client_timeout=_ANSWER_S).name
            if name != "triton":
                yield Finding("error", f"{subject.url}: {name} answers", "name Triton's gRPC port")
                return
            for model in sorted(subject.configs) or [BLS.name, subject.target]:
                if not client.is_model_ready(model, client_timeout=_ANSWER_S):
                    what, mend = f"{subject.url}: {model} is not ready", "see the server's log"
                    yield Finding("error", what, mend)
        except InferenceServerException as error:
            what = f"{subject.url}: no answer from Triton ({error.message()})"
            yield Finding("error", what, "start the server, or name its gRPC port with --url")


@check("the server serves this repository", lambda s: s.url and s.repository)
def same_repository(subject: Subject) -> Findings:
    """Another Triton may answer, with models of the same names."""
    with _client(subject) as client:
        for model in sorted(subject.configs):
            with suppress(InferenceServerException):  # told by the check of the server
                answer = client.get_model_config(model, client_timeout=_ANSWER_S)
                values = {k: v.string_value for k, v in answer.config.parameters.items()}
                mine = subject.values(model)
                differing = [key for key in mine.keys() & values if mine[key] != values[key]]
                if differing:
                    what = f"{subject.url}: {model} has other values of {', '.join(differing)}"
                    mend = (
                        "is it another server, or one with other options or from before a change?"
                    )
                    yield Finding("warn", what, mend)


def _client(subject: Subject) -> Any:
    # A proxy that the environment names is not used here; the check of proxies reports it.
    channel_args: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    tls = subject.tls
    if not tls.is_asked_for:
        return InferenceServerClient(subject.url, channel_args=channel_args)
    if tls.tls_server_name:
        channel_args.append(("grpc.ssl_target_name_override", tls.tls_server_name))
    return InferenceServerClient(
        subject.url,
        ssl=True,
        root_certificates=tls.tls_ca and str(tls.tls_ca),
        private_key=tls.tls_key and str(tls.tls_key),
        certificate_chain=tls.tls_cert and str(tls.tls_cert),
        channel_args=channel_args,
    )
