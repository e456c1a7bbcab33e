"""``trtllm-bls drain``: prepare a server for its end, as a preStop hook does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from trtllm_bls.errors import SettingsError
from trtllm_bls.orchestrator.status import StatusDirectory
from trtllm_bls.settings.model_names import BLS_NAME
from trtllm_bls.settings.parameters import STATUS_DIR

POLL_SECONDS = 0.05


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    envvar=STATUS_DIR,
    show_envvar=True,
    required=True,
    help=f"The status_dir of {BLS_NAME}.",
)
@click.option(
    "--notice",
    default=0.0,
    show_default=True,
    help="Seconds before it, in which health probes fail while requests are still served.",
)
@click.option(
    "--timeout", default=10.0, show_default=True, help="Seconds to wait for the hand-over."
)
@click.option("--deadline", default=30.0, show_default=True, help="Seconds until requests are cut.")
@click.option("--wait", is_flag=True, help="Return only when no request runs any more.")
def command(directory: Path, notice: float, timeout: float, deadline: float, wait: bool) -> None:
    """Make a server refuse new requests, and return when it may be sent SIGTERM.

    Where a router probes /health, give it --notice: it then stops sending before anything is
    refused. Each request with speculative decoding changes to plain decoding, with one last request
    to the engine, because a stopping Triton accepts no further ones. Requests that still run after
    --deadline seconds end with an error. The exit code is 1 if this hand-over took longer than
    --timeout, or if no server process writes its status into --dir. `trtllm-bls serve` does the
    same on SIGTERM.

    \b
    Examples:
      trtllm-bls drain --dir /run/trtllm-bls
      trtllm-bls drain --dir /run/trtllm-bls --timeout 20 --deadline 60
      trtllm-bls drain --dir /run/trtllm-bls --notice 5 --wait
    """
    files = StatusDirectory(directory)
    try:
        if notice:
            files.give_notice()
            time.sleep(notice)
        files.ask_to_drain(time.monotonic() + deadline)
    except OSError as error:
        raise SettingsError(f"--dir {directory}: {error.strerror}") from error
    drained_at = time.monotonic()
    if not files.read():
        raise SettingsError(
            f"--dir {directory}: no process keeps a status there; it is the status_dir of "
            f"{BLS_NAME}, and one of this machine"
        )

    def is_idle() -> bool:
        return not any(status.running for status in files.read())

    _sleep_until(lambda: files.handed_over, drained_at + timeout)
    handed_over = files.handed_over
    if wait:  # requests that still run at the deadline end then, which takes a moment
        _sleep_until(is_idle, drained_at + deadline + 2.0)
    for status in files.read():
        state = "not handed over"
        if status.handed_over:
            state = "handed over"
        click.echo(f"process {status.pid}: {state}, requests running: {status.running}")
    sys.exit(not handed_over)


def _sleep_until(condition: Callable[[], bool], until: float) -> None:
    while not condition() and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
