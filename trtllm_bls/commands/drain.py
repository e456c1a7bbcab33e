"""``trtllm-bls drain``: prepare a server for its end, as a preStop hook does."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from trtllm_bls.errors import SettingsError
from trtllm_bls.parameters import STATUS_DIR
from trtllm_bls.status import StatusDirectory

POLL_SECONDS = 0.05


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    envvar=STATUS_DIR,
    show_envvar=True,
    required=True,
    help="The status_dir of tensorrt_llm_bls.",
)
@click.option(
    "--timeout", default=10.0, show_default=True, help="Seconds to wait for the hand-over."
)
@click.option("--deadline", default=30.0, show_default=True, help="Seconds until requests are cut.")
def command(directory: Path, timeout: float, deadline: float) -> None:
    """Have tensorrt_llm_bls take no new requests, and return once the server may be told to stop.

    Requests with speculative decoding go over to one plain request each, which a stopping
    server still serves. What runs after --deadline seconds ends with an error. The exit code is 1
    if that took longer than --timeout. `trtllm-bls serve` does the same on SIGTERM.

    \b
    Examples:
      trtllm-bls drain --dir /run/trtllm-bls
      trtllm-bls drain --dir /run/trtllm-bls --timeout 20 --deadline 60
    """
    files = StatusDirectory(directory)
    try:
        files.ask_to_drain(time.monotonic() + deadline)
    except OSError as error:
        raise SettingsError(f"--dir {directory}: {error.strerror}") from error
    until = time.monotonic() + timeout
    while not files.handed_over and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    for status in files.read():
        state = "handed over" if status.handed_over else "not handed over"
        click.echo(f"process {status.pid}: {state}, {status.running} requests run")
    sys.exit(0 if files.handed_over else 1)
