"""The doctor judged by tritonserver: what it refuses to load is an error, what it loads is none."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.planted_models import PLANTED, write
from tests.helpers.server_settings import free_ports
from tests.helpers.waiting import until
from trtllm_bls.operate import checks, preparation
from trtllm_bls.operate.doctor import CHECKS
from trtllm_bls.operate.findings import Subject, examine
from trtllm_bls.operate.ports import choose
from trtllm_bls.operate.preparation import Scratch
from trtllm_bls.operate.tritonserver import GuardedProcess

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
STUBS = 24  # processes of Python models that one server starts
CALLED = [
    "good",
    "code_syntax",
    "decoupled",
    "optional_in",
    "ens_two_ok",
    "nobatch_step",
]  # by them


def loaded(repository: Path) -> set[str] | None:
    """The models that a server with this repository has loaded; ``None``: it has crashed."""
    settings = free_ports(model_repository=repository)
    ports, lines = choose(settings), list[str]()
    scratch = Scratch()
    process = GuardedProcess(scratch, 1, lines.append)
    try:
        scratch.make()
        server = checks.find_server(None)
        libraries = preparation.links(scratch.workdir / "lib", [checks.libpython()])
        environment = preparation.server_environment(settings, ports, libraries, os.environ)
        backends = preparation.link_backends(scratch.workdir, server)
        order = preparation.server_command(
            server, settings, ports, repository, backends, scratch.region_prefix
        )
        order = [word for word in order if "restricted" not in word]
        order += ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false"]
        process.run([*order, "--strict-readiness=false"], environment)

        def index() -> list[dict[str, str]] | None:
            if not process.running:
                return [{}]
            try:
                url = f"{ports.http_url}/v2/repository/index"
                asked = urllib.request.Request(url, data=b"{}", method="POST")
                with urllib.request.urlopen(asked, timeout=20) as answer:
                    return list(json.load(answer))
            except OSError:
                return None

        found = until(index, seconds=300)
        if found == [{}]:
            return None
        return {row["name"] for row in found if row.get("state") == "READY"}
    finally:
        process.kill()
        process.close()


def groups() -> Iterator[list[str]]:
    """Names of models for one server each, whose Python models that get as far are few enough."""
    group, stubs = list[str](), 0
    for name, planted in PLANTED.items():
        group.append(name)
        stubs += planted.code is not None
        if stubs >= STUBS:
            yield group
            group, stubs = [], 0
    yield group


def judged(place: Path, group: list[str]) -> set[str]:
    """Those of the models that load. Some faults crash the server (24.10), and are told apart."""
    called = [name for name in CALLED if any(n.startswith("ens_") for n in group)]
    repository = place / "-".join((group[0], group[-1]))
    write(repository, list(dict.fromkeys([*called, *group])))
    ready = loaded(repository)
    if ready is not None:
        return ready & set(group)
    half = len(group) // 2
    return judged(place, group[:half]) | judged(place, group[half:]) if half else set()


def test_what_triton_refuses_is_an_error_and_what_it_loads_is_none(tmp_path: Path) -> None:
    """All planted models, many in one server."""
    repository = tmp_path / "all"
    write(repository, list(PLANTED))
    chosen = [each for each in CHECKS if each.name in ("readable", "layout", "programs")]
    found = [f for _, f in examine(Subject(repository=repository, ports={}), chosen)]
    named = set[str]()
    for finding in (each for each in found if each.level == "error"):
        what = finding.what.removeprefix(f"{repository}/")
        named.add(what.partition(":")[0].partition("/")[0])
        assert finding.mend, finding
    ready = {name for group in groups() for name in judged(tmp_path, group)}
    assert named == PLANTED.keys() - ready
    assert len(named) >= 60 and len(ready) >= 20
