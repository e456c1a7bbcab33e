"""The files in deploy/: valid for Kubernetes, and in the words of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from trtllm_bls import __version__
from trtllm_bls.cli import main
from trtllm_bls.parameters import STATUS_DIR
from trtllm_bls.services import request_metrics
from trtllm_bls.settings import ServeSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PORTS = [
    field.name.removesuffix("_port") for field in fields(ServeSettings) if "_port" in field.name
]


def documents(manifest: Path) -> list[Any]:
    return list(yaml.safe_load_all(manifest.read_text(encoding="utf-8")))


def servers() -> Iterator[tuple[Any, Any]]:
    """Each pod's specification, and its container with this package."""
    for manifest in MANIFESTS:
        for document in documents(manifest):
            if document["kind"] == "Deployment":
                pod = document["spec"]["template"]["spec"]
                yield pod, next(c for c in pod["containers"] if c["name"] == "server")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_every_object(manifest: Path, version: str) -> None:
    """By the schemas of an older and the newest release, unknown fields refused."""
    for document in documents(manifest):
        kubernetes_validate.validate(document, version, strict=True)


def test_what_is_served_is_what_is_asked_for() -> None:
    """Ports, probes and the autoscaler's metric have the names of the code."""
    assert list(servers())
    settings = ServeSettings()
    for _, server in servers():
        ports = {port["name"]: port["containerPort"] for port in server["ports"]}
        for name in PORTS:
            assert ports[name] == getattr(settings, f"{name}_port")
        assert server["image"].endswith(f":{__version__}")
    scalers = [d for m in MANIFESTS for d in documents(m) if d["kind"].startswith("Horizontal")]
    metrics = [metric["pods"]["metric"]["name"] for s in scalers for metric in s["spec"]["metrics"]]
    known = re.findall(r'"(trtllm_bls_\w+)"', Path(request_metrics.__file__).read_text())
    assert metrics
    assert set(metrics) <= set(known)


def test_a_pods_end_waits_for_its_requests() -> None:
    """preStop drains the server in the directory that it keeps its status in; the grace period
    covers that and the time that running requests have."""
    command = main.get_command(click.Context(main), "drain")
    assert command is not None
    for pod, server in servers():
        shell, option, script = server["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, option) == ("sh", "-c")
        sleep, _, drain = script.partition("; exec ")
        wait = int(sleep.removeprefix("sleep "))
        variables = {row["name"]: row["value"] for row in server["env"]}
        words = [*drain.split()[2:], "--dir", variables[STATUS_DIR]]
        asked = command.make_context("drain", words).params
        assert drain.startswith("trtllm-bls drain ") and asked["wait"]
        kept = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "emptyDir" in volumes[kept[variables[STATUS_DIR]]]
        timeout = next(a for a in server["args"] if a.startswith("--exit-timeout="))
        assert asked["deadline"] <= int(timeout.partition("=")[2])
        assert wait + asked["deadline"] + 10 < pod["terminationGracePeriodSeconds"]
        for other in pod["containers"]:
            if other is not server:  # the engine must not go first
                ends = int(other["lifecycle"]["preStop"]["exec"]["command"][1])
                assert ends > wait + asked["deadline"] + 2


def test_the_arguments_are_those_of_serve() -> None:
    """Parsed by the command line itself."""
    command = main.get_command(click.Context(main), "serve")
    assert command is not None
    for _, server in servers():
        assert server["args"][0] == "serve"
        command.make_context("serve", server["args"][1:])
    last = (DEPLOY / "Containerfile").read_text(encoding="utf-8").strip().splitlines()[-1]
    words = yaml.safe_load(last.removeprefix("CMD "))
    command.make_context("serve", words[1:])
