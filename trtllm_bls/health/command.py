"""``trtllm-bls health``: one look at a server, from anywhere."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import click

from trtllm_bls.client import Tls
from trtllm_bls.errors import ConnectionFailed, SettingsError
from trtllm_bls.health.probe import TEXT_MODEL, Probe
from trtllm_bls.health.processes import ServerProcesses, find_server, free_shared_memory
from trtllm_bls.health.verdict import CANARY_FAILURES, Observed, Verdict, evaluate
from trtllm_bls.settings import TlsConnection, is_loopback, options_of


@click.command()
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="host:port of gRPC.")
@click.option(
    "--model",
    "models",
    multiple=True,
    default=(TEXT_MODEL,),
    show_default=True,
    help="A model that must be ready; may be repeated.",
)
@click.option(
    "--canary/--no-canary", default=True, help=f"Ask {TEXT_MODEL} for a token.", show_default=True
)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that an answer may take.")
@options_of(TlsConnection)
@click.option("--json", "as_json", is_flag=True, help="Print an object instead of lines.")
def command(
    url: str,
    models: tuple[str, ...],
    canary: bool,
    timeout: float,
    as_json: bool,
    **connection: Any,
) -> None:
    """Check whether a server can serve: exit code 0 if so, else 1 and a line for each reason.

    Asks whether the models are ready, and for one token. For a server on this machine, also checks
    its processes and the shared memory.

    \b
    Examples:
      trtllm-bls health
      trtllm-bls health --url gpu-host:8001 --timeout 30 --json
      trtllm-bls health --url gpu-host:8001 --tls
    """
    tls = Tls.of_options(connection)
    verdict = asyncio.run(look(url, models, timeout, canary=canary, tls=tls))
    if as_json:
        click.echo(json.dumps({"ready": verdict.ready, "reasons": verdict.reasons}))
    else:
        for line in verdict.reasons or ("ready",):
            click.echo(line)
    sys.exit(0 if verdict.ready else 1)


async def look(
    url: str, models: tuple[str, ...], timeout: float, *, canary: bool, tls: Tls | None = None
) -> Verdict:
    """Check the server at ``url`` once. Raises ``SettingsError`` for an invalid address."""
    host, _, port = url.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"--url {url}: write host:port, where gRPC is served")
    here = is_loopback(host.strip("[]"))
    local = find_server(int(port)) if here else None
    server = ServerProcesses(local) if local is not None else None
    processes = server.problems() if server else ()
    probe = Probe(url, tls=tls)
    missing, error, failures = await _asked(probe, models, timeout, canary and not processes)
    observed = Observed(
        processes=processes,
        descriptors=server.without_descriptors() if server else (),
        models=missing,
        canary_failures=failures,
        canary_error=error,
        shared_memory=free_shared_memory() if here else None,
    )
    return evaluate(observed, time.monotonic())


async def _asked(
    probe: Probe, models: tuple[str, ...], timeout: float, canary: bool
) -> tuple[tuple[str, ...], str, int]:
    """The models that are not ready, the canary's error, and the number of failures in a row.

    This command asks only once, so one failure counts as enough of them.
    """
    async with probe:
        try:
            missing = await probe.models_not_ready(models, timeout)
        except ConnectionFailed as error:
            return (), str(error), CANARY_FAILURES
        if canary and not missing:
            answer = await probe.canary(timeout)
            if answer.outcome in ("late", "failed"):  # a full server is at work
                return (), answer.error, CANARY_FAILURES
        return missing, "", 0
