"""The command line of ``doctor``."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
from rich.console import Console
from rich.text import Text

# Importing them puts their checks into the list.
from trtllm_bls.doctor import machine, repository, server, text  # noqa: F401
from trtllm_bls.doctor.findings import Finding, examine
from trtllm_bls.doctor.subject import Subject
from trtllm_bls.settings import TlsConnection, options_of

_STYLES = {"ok": "green", "warn": "yellow", "error": "red"}


@click.command(name="doctor")
@options_of(Subject)
@options_of(TlsConnection)
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of lines.")
def command(as_json: bool, **given: Any) -> None:
    """Look for what would go wrong: in a repository, at a server, on this machine.

    Exit code 0: no errors; 1: errors; 2: wrong options.

    \b
    Examples:
      trtllm-bls doctor
      trtllm-bls doctor --model-repository . --version 0.19
      trtllm-bls doctor --url localhost:8001 --json
      trtllm-bls doctor --url gpu-host:8001 --tls
    """
    tls = TlsConnection.take(given)
    findings = list(examine(Subject(**given, tls=tls)))
    count = {level: sum(f.level == level for _, f in findings) for level in _STYLES}
    if as_json:
        found = [{"check": name, **vars(finding)} for name, finding in findings]
        click.echo(json.dumps({"findings": found, "count": count}, indent=1, ensure_ascii=False))
    else:
        _show(findings)
        click.echo(f"{count['error']} errors, {count['warn']} warnings")
    sys.exit(1 if count["error"] else 0)


def _show(findings: list[tuple[str, Finding]]) -> None:
    console = Console(highlight=False)
    for name, finding in findings:
        line = Text(f"{finding.level:<5} ", style=_STYLES[finding.level])
        line.append(f"{name}: {finding.what}", style="")
        if finding.mend:
            line.append(f"; {finding.mend}", style="")
        console.print(line, soft_wrap=True)
