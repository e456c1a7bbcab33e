"""The files in deploy/: valid for Kubernetes, and in the words of this package."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.waiting import until
from trtllm_bls import __version__
from trtllm_bls.cli import main
from trtllm_bls.operate.watch import SERVER_METRICS
from trtllm_bls.settings.command_options import ServeSettings
from trtllm_bls.settings.parameters import STATUS_DIR

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = sorted(each.parent for each in (DEPLOY / "kubernetes").glob("overlays/*/*ization.yaml"))
PORTS = [
    field.name.removesuffix("_port")
    for field in fields(ServeSettings)
    if "_port" in field.name and field.default is not None  # Triton's own HTTP port is closed
]


ROUTER = "smg"
IMAGES = sorted((Path(__file__).parent / "images").glob("*.txt"))


@cache
def rendered(*parts: str) -> str:
    """What ``kubectl apply -k`` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl, which renders the overlays: install it to run this")
    order = [kubectl, "kustomize", str((DEPLOY / "kubernetes").joinpath(*parts))]
    return subprocess.run(order, capture_output=True, text=True, check=True, timeout=120).stdout


def documents(overlay: Path) -> list[Any]:
    return list(yaml.safe_load_all(rendered("overlays", overlay.name)))


def servers() -> Iterator[tuple[Any, Any]]:
    """Each pod's specification, and its container with this package."""
    for overlay in OVERLAYS:
        for document in documents(overlay):
            if document["kind"] == "Deployment" and document["metadata"]["name"] != ROUTER:
                pod = document["spec"]["template"]["spec"]
                yield pod, next(c for c in pod["containers"] if c["name"] == "server")


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.27", "1.30", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_every_object(overlay: Path, version: str) -> None:
    """By the schemas of two older and the newest release, unknown fields refused."""
    assert len(documents(overlay)) > 5
    for document in documents(overlay):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("component", ["keda", "prometheus-operator"])
def test_each_overlay_takes_the_components(component: str, tmp_path: Path) -> None:
    """KEDA replaces the autoscaler; the operator's rules are those of ``alerts.yaml``."""
    kubernetes = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", kubernetes)
    for overlay in OVERLAYS:
        file = kubernetes / "overlays" / overlay.name / "kustomization.yaml"
        own = file.read_text(encoding="utf-8")
        file.write_text(f"{own}components: [../../components/{component}]\n", encoding="utf-8")
        found = {
            (each["kind"], each["metadata"]["name"]): each
            for each in yaml.safe_load_all(rendered(str(file.parent)))
        }
        file.write_text(own, encoding="utf-8")
        scaled = ("HorizontalPodAutoscaler", "trtllm-bls") in found
        if component == "keda":
            trigger = found["ScaledObject", "trtllm-bls"]["spec"]["triggers"][0]["metadata"]
            assert not scaled and "trtllm_bls_server_num_requests_waiting" in trigger["query"]
        else:
            rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))
            assert scaled and found["PrometheusRule", "trtllm-bls"]["spec"] == rules
            scraped = found["PodMonitor", "trtllm-bls"]["spec"]["podMetricsEndpoints"]
            assert {each["port"] for each in scraped} <= set(PORTS)


def test_the_server_writes_into_volumes_alone() -> None:
    """Its root is read-only, and it has no token of Kubernetes."""
    for pod, server in servers():
        assert server["securityContext"]["readOnlyRootFilesystem"]
        assert pod["automountServiceAccountToken"] is False
        volumes = {each["name"]: each for each in pod["volumes"]}
        paths = {each["mountPath"]: volumes[each["name"]] for each in server["volumeMounts"]}
        assert "emptyDir" in paths["/tmp"] and "emptyDir" in paths["/dev/shm"]


def test_what_is_served_is_what_is_asked_for() -> None:
    """Ports, probes and the autoscaler's metric have the names of the code."""
    assert list(servers())
    settings = ServeSettings()
    for _, server in servers():
        ports = {port["name"]: port["containerPort"] for port in server["ports"]}
        for name in PORTS:
            assert ports[name] == getattr(settings, f"{name}_port")
        assert server["image"].endswith(f":{__version__}")
    scalers = [d for m in OVERLAYS for d in documents(m) if d["kind"].startswith("Horizontal")]
    metrics = [
        metric["pods"]["metric"]["name"]
        for scaler in scalers
        if scaler["metadata"]["name"] != ROUTER  # by its own CPU
        for metric in scaler["spec"]["metrics"]
    ]
    assert metrics
    assert set(metrics) <= {metric.name for metric in SERVER_METRICS}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_what_an_autoscaler_scales_has_no_number_of_replicas(overlay: Path) -> None:
    """Else each ``kubectl apply`` would set a busy service back to that number."""
    found = documents(overlay)
    scaled = [
        scaler["spec"]["scaleTargetRef"]["name"]
        for scaler in found
        if scaler["kind"] == "HorizontalPodAutoscaler"
    ]
    assert "trtllm-bls" in scaled
    for document in found:
        if document["kind"] == "Deployment" and document["metadata"]["name"] in scaled:
            assert "replicas" not in document["spec"]


METRICS_PORTS = {"health", "metrics", "openai"}


def test_all_ports_with_metrics_are_scraped() -> None:
    """By both ways that are shipped; tests/live/test_alerts.py asks a server for what is there."""
    monitor, *_ = yaml.safe_load_all(
        (DEPLOY / "kubernetes/components/prometheus-operator/monitor.yaml").read_text()
    )
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == METRICS_PORTS
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    kept = [rule["regex"] for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    assert kept == ["trtllm-bls", "|".join(sorted(METRICS_PORTS))]


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_prometheus_of_another_namespace_is_admitted(overlay: Path) -> None:
    """To each port with metrics, by the label that its operator and its chart give it."""
    (policy,) = [each for each in documents(overlay) if each["kind"] == "NetworkPolicy"]
    labels = {"app.kubernetes.io/name": "prometheus"}
    admitted = set()
    for rule in policy["spec"]["ingress"]:
        everybody = [{"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}]
        if rule.get("from", everybody) == everybody:
            admitted |= {port["port"] for port in rule["ports"]}
    assert admitted == METRICS_PORTS


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: `apt-get install prometheus` runs it"
)
def test_prometheus_accepts_the_scrape_job(tmp_path: Path) -> None:
    """By its own check, the alerts too; Debian's Prometheus does not know Kubernetes."""
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert config["scrape_configs"][0].pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    order = ["promtool", "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(order, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_container_has_privileges_and_serve_is_not_root() -> None:
    """In every manifest; what a pod says holds for its containers unless they say otherwise."""
    for pod, server in servers():
        for container in pod["containers"]:
            rules = pod["securityContext"] | container["securityContext"]
            assert rules["seccompProfile"] == {"type": "RuntimeDefault"}
            assert rules["allowPrivilegeEscalation"] is False
            assert rules["capabilities"] == {"drop": ["ALL"]}
        rules = pod["securityContext"] | server["securityContext"]
        assert rules["runAsNonRoot"] and rules["runAsUser"] and rules["fsGroup"]


def test_network_policies_and_services_name_ports_that_there_are() -> None:
    """A rule for another name would open nothing, or close what is needed."""
    named = {port["name"] for _, server in servers() for port in server["ports"]}
    (router,) = next(
        document["spec"]["template"]["spec"]["containers"]
        for document in documents(Path("smg"))
        if document["kind"] == "Deployment" and document["metadata"]["name"] == ROUTER
    )
    for document in (d for m in OVERLAYS for d in documents(m)):
        if document["kind"] == "NetworkPolicy":
            rules = [port for rule in document["spec"]["ingress"] for port in rule["ports"]]
            assert {port["port"] for port in rules} == named
        if document["kind"] == "Service":
            known = named
            if document["metadata"]["name"] == ROUTER:
                known = {port["name"] for port in router["ports"]}
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= known


def test_an_engine_that_is_not_well_for_long_is_started_again() -> None:
    """By its container's own probes, whose command is run here before a service that is played."""
    for pod, server in servers():
        for engine in (each for each in pod["containers"] if each is not server):
            live, started = engine["livenessProbe"], engine["startupProbe"]
            assert live["exec"] == started["exec"]
            python, *words = live["exec"]["command"]
            assert python == "python3"
            own = next(word.partition("=")[2] for word in engine["args"] if "--port=" in word)
            with service_in_a_thread(EchoEngine(Script()), Behaviour()) as (service, url):
                words = [word.replace(f"127.0.0.1:{own}", url) for word in words]
                assert url in words[-1]

                def probed(words: list[str] = words) -> int:
                    order = [sys.executable, *words]
                    return subprocess.run(order, capture_output=True, timeout=240).returncode

                assert probed() == 0
                service.behaviour = Behaviour(health="RuntimeError: dead")
                assert probed() == 1
            assert probed() == 1  # nobody listens
            assert live["timeoutSeconds"] > 10


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


# --- the container --------------------------------------------------------------------------


# The last httpcore that runs with the image's h11; their own requirements say which.
HTTPCORE = {"25.03": "1.0.8", "26.07": "1.0.9"}
NEEDS_OF_HTTPCORE = {"1.0.8": ["certifi", "h11<0.15,>=0.13"], "1.0.9": ["certifi", "h11>=0.16"]}
NEEDS_OF_WSPROTO = "h11>=0.9,<1"  # the last that runs with 25.03's


def installs(image: Path) -> list[list[str]]:
    """The words of each ``pip install`` in the Containerfile, with the arguments for ``image``."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    text = text.replace("${HTTPCORE}", HTTPCORE[image.stem])
    return [
        shlex.split(line)[3:] for line in text.splitlines() if line.startswith("RUN pip install ")
    ]


def copied() -> list[tuple[str, str]]:
    """What the Containerfile copies, and where to."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
    return [(source, target) for *sources, target in lines for source in sources]


def pinned(words: list[str]) -> dict[str, str]:
    """``name==version`` words as a mapping; every one must be of that form."""
    pairs = [word.split("==") for word in words if word and not word.startswith(("#", "--"))]
    return {canonicalize_name(name): version for name, version in pairs}


def ours() -> list[Requirement]:
    """What this package needs, its OpenAI API included."""
    config = configparser.ConfigParser()
    config.read(DEPLOY.parent / "setup.cfg", encoding="utf-8")
    texts = (config["options"]["install_requires"], config["options.extras_require"]["openai"])
    return [Requirement(line) for line in "\n".join(texts).splitlines() if line]


def wanted(requirements: Iterable[Requirement]) -> list[Requirement]:
    """Those that count in the images: Python 3.12, no extras."""
    where = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
    return [each for each in requirements if each.marker is None or each.marker.evaluate(where)]


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_the_containers_packages_are_whole_and_replace_nothing(image: Path) -> None:
    """What the image has, with what is added to it, is all that this package and those need."""
    this, missing = installs(image)
    assert this == ["--no-deps", "."]
    assert missing[0] == "--no-deps"
    added, there = pinned(missing), pinned(image.read_text(encoding="utf-8").splitlines())
    assert not added.keys() & there.keys()
    packages = there | added
    theirs = [
        text
        for name in added.keys() - {"httpcore", "wsproto"}
        for text in importlib.metadata.requires(name) or []
    ]
    theirs += [*NEEDS_OF_HTTPCORE[added["httpcore"]], NEEDS_OF_WSPROTO]
    required = wanted([*ours(), *map(Requirement, theirs)])
    for requirement in required:
        version = packages[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (str(requirement), version)
    assert added.keys() <= {canonicalize_name(each.name) for each in required}


@pytest.mark.skipif(
    "TRTLLM_BLS_INSTALL_CLIENTS" not in os.environ,
    reason="installs packages; set TRTLLM_BLS_INSTALL_CLIENTS=1 to run it",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_the_containers_own_lines_install_it(image: Path, tmp_path: Path) -> None:
    """In an environment made of the image's packages: pip and doctor find nothing wrong, and the
    API answers."""
    venv.create(tmp_path / "venv", with_pip=True)
    bin_ = tmp_path / "venv" / "bin"
    pip = [bin_ / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    root, context = DEPLOY.parent, tmp_path / "context"
    for source, target in copied():
        there = context / target / (source if target == "./" else "")
        there.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (root / source).is_dir() else shutil.copyfile
        copy(root / source, there)
    for words in (["--no-deps", "-r", str(image)], *installs(image)):
        subprocess.run([*pip, "install", *words], check=True, cwd=context, timeout=600)
    told = subprocess.run([*pip, "check"], capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout
    doctor = [bin_ / "trtllm-bls", "doctor", "--json"]
    found = json.loads(subprocess.run(doctor, capture_output=True, check=False, timeout=120).stdout)
    levels = [each["level"] for each in found["findings"] if each["check"] == "packages"]
    assert levels == ["ok"], found
    api = [bin_ / "trtllm-bls", "openai", "--port", "0", "--workers", "2"]
    api += ["--engine", "trtllm://127.0.0.1:1"]
    api += ["--tokenizer-dir", root / "assets" / "demo" / "target"]
    with Child(api, name="openai") as running:
        url = running.output.next().split()[-1].removesuffix("/v1")
        until(lambda: b"trtllm_bls" in got(f"{url}/metrics"), seconds=120)
        assert b"trtllm://127.0.0.1:1" in got(f"{url}/health")
        running.terminate()


def got(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.read()
    except OSError:
        return b""
