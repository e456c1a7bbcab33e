"""Every alert, fired by a real server in a real Prometheus, which scrapes it as is shipped.

The engine is a service that is played, whose requests fail, hang or are slow by their seed. Only
times are shorter than in ``deploy/alerts.yaml``: windows, how long a condition must hold, and how
often Prometheus looks.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from doubles.scripted import Fault, Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.children import Child
from tests.helpers.ports import unused_ports
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.served import Served, good
from tests.helpers.server_settings import DEMO, ROOT
from tests.helpers.waiting import eventually, until
from trtllm_bls.client import Client
from trtllm_bls.errors import EngineError
from trtllm_bls.text.tokenizer import load_tokenizer
from trtllm_bls.types import EngineChunk, EngineRequest

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: `apt-get install prometheus` runs it"
)

DEPLOY = ROOT / "deploy"
FAILS, HANGS, HANGS_AT_ONCE, SLOW = 666001, 666002, 666003, 666004
FAULTS = {
    FAILS: Fault(error=EngineError("the script says so")),
    HANGS: Fault(error=None, after_tokens=2),
    HANGS_AT_ONCE: Fault(error=None),
}
# A window must see several ends of requests, and restarts, which are some ten seconds apart.
WINDOWS = {"[5m]": "[12s]", "[10m]": "[12s]", "[15m]": "[240s]"}
TIME_LIMIT_S = 25  # of a request: longer than two windows
# Drafts are nothing for an engine that is a service. promtool fires this alert in
# tests/unit/test_dashboards.py.
NOT_HERE = {"TrtllmBlsDraftsFail"}


class MoodyEngine(EchoEngine):
    """An echo whose slow requests wait for their first token, and again after it."""

    async def _chunks(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        is_slow = request.sampling.seed == SLOW
        async for chunk in super()._chunks(request):
            if is_slow:
                await asyncio.sleep(6.0)
            yield chunk


# --- Prometheus -----------------------------------------------------------------------------


@dataclass
class Prometheus:
    url: str

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=20) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[str]:
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def has(self, metric: str) -> bool:
        return bool(self.ask(f"series?match[]={metric}"))


def shortened(rules: str) -> str:
    """The alerts with shorter times; what they compare stays."""
    for window, shorter in WINDOWS.items():
        rules = rules.replace(window, shorter)
    assert set(re.findall(r"\[\w+\]", rules)) == set(WINDOWS.values())
    return re.sub(r"for: \d+m", "for: 1s", rules)


@contextmanager
def prometheus(directory: Path, addresses: dict[str, str]) -> Iterator[Prometheus]:
    """A Prometheus with the shipped scrape job; ``addresses`` by the name of a container's port.

    In place of Kubernetes' own list of pods it has these addresses, with the labels that Kubernetes
    gives them. A port that nobody should scrape is among them.
    """
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = []
    for name, address in addresses.items():
        labels = {
            "__meta_kubernetes_pod_label_app_kubernetes_io_name": "trtllm-bls",
            "__meta_kubernetes_pod_container_port_name": name,
            "__meta_kubernetes_namespace": "default",
            "__meta_kubernetes_pod_name": "trtllm-bls-0",
        }
        job["static_configs"].append({"targets": [address], "labels": labels})
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = shortened((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))
    (directory / "alerts.yaml").write_text(rules, encoding="utf-8")
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (port,) = unused_ports(1)
    words = ["prometheus", f"--config.file={directory / 'prometheus.yaml'}"]
    words += [f"--storage.tsdb.path={directory / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}"]
    running = Prometheus(f"http://127.0.0.1:{port}")

    with Child(words, name="Prometheus") as child:

        def is_ready() -> bool:
            assert child.running, child.report()
            with suppress(OSError):
                return running.firing() is not None
            return False

        until(is_ready)
        yield running


# --- load -----------------------------------------------------------------------------------


async def ask_openai(http: httpx.AsyncClient, seed: int) -> None:
    body = {"model": "target", "prompt": "one two three", "max_tokens": 3, "seed": seed}
    with suppress(httpx.HTTPError):
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                pass


async def call_a_tool(http: httpx.AsyncClient) -> None:
    """The engine says the prompt back, with a call in it that is none."""
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    content = '<tool_call>\n{"name": "look", "arguments": {{{\n</tool_call>'
    body = {
        "model": "target",
        "messages": [{"role": "user", "content": content}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 200,
    }
    with suppress(httpx.HTTPError):
        await http.post("/v1/chat/completions", json=body)


@asynccontextmanager
async def load(served: Served) -> AsyncIterator[None]:
    """Requests of which none ends on Triton's port, and all that may go wrong on the other."""
    tasks: set[asyncio.Task[None]] = set()

    async def hang(client: Client, seed: int) -> None:
        while True:
            with suppress(Exception):
                await client.generate(
                    text_input="one two three", max_tokens=9, stream=True, seed=seed
                )

    async def arrive(http: httpx.AsyncClient) -> None:
        while True:
            for seed in (FAILS, FAILS, HANGS, HANGS, SLOW):
                tasks.add(asyncio.create_task(ask_openai(http, seed)))
            tasks.add(asyncio.create_task(call_a_tool(http)))
            await asyncio.sleep(1.0)

    limits = httpx.Limits(max_connections=None)
    url = served.urls["OpenAI"].removesuffix("/v1")
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as http,
        Client(served.urls["gRPC"]) as client,
    ):
        for seed in (HANGS, HANGS_AT_ONCE):
            tasks.add(asyncio.create_task(hang(client, seed)))
        tasks.add(asyncio.create_task(arrive(http)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


HOG = """
import os
import time

os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        pass
    time.sleep(0.3)  # in which a scrape has its answer
"""


def may_take_a_core() -> bool:
    """Return True if the programs of this user may run before all others."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


@contextmanager
def short_of_cpu(worker: psutil.Process) -> Iterator[None]:
    """Let a real-time program take the core of the worker's event loop, two thirds of the time.

    Call it while requests run: a loop without requests needs so little CPU that it never waits.
    The thread that measures the lag may run on another core. Without CPU it would measure nothing.
    """
    (core, *_) = sorted(os.sched_getaffinity(0))
    with Child(["taskset", "-c", str(core), sys.executable, "-c", HOG], name="a hog"):
        os.sched_setaffinity(worker.pid, {core})  # of its main thread
        yield


# --- the test -------------------------------------------------------------------------------


def alerts() -> dict[str, str]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_alert_fires_where_its_cause_is(tmp_path: Path) -> None:
    """And before there is a cause, none but that there is no server."""
    expected = set(alerts()) - NOT_HERE
    fired: set[str] = set()
    can_starve = may_take_a_core()
    with ExitStack() as stack:
        tokenizer = load_tokenizer(DEMO / "target")
        vocabulary = tokenizer.model_vocab_size
        engines = []
        for _ in range(2):
            engine = MoodyEngine(Script(step_seconds=0.005, vocab_size=vocabulary), FAULTS)
            behaviour = Behaviour(eos_id=tokenizer.eos_id or 0, vocab_size=tokenizer.vocab_size)
            engines.append(stack.enter_context(service_in_a_thread(engine, behaviour)))
        urls = "trtllm://" + ",".join(url for _, url in engines)
        (openai_port,) = unused_ports(1)
        served = Served(
            None,
            *("--engine", urls, "--model", str(DEMO / "target")),
            *("--openai-port", str(openai_port), "--openai-workers", "1"),
            *("--tool-parser", "hermes"),
            *("--set", f"tensorrt_llm_bls.request_timeout_seconds={TIME_LIMIT_S}"),
            *("--set", "tensorrt_llm_bls.max_running_requests=24"),
            *("--set", "tensorrt_llm_bls.max_queued_requests=0"),
        )
        stack.callback(served.process.kill)
        addresses = {"health": address(served.urls["health"])}
        addresses["metrics"] = address(served.urls["metrics"])
        addresses["openai"] = address(served.urls["OpenAI"])
        addresses["grpc"] = served.urls["gRPC"]
        watching = stack.enter_context(prometheus(tmp_path, addresses))

        def fire(*names: str) -> bool:
            fired.update(watching.firing())
            return fired.issuperset(names)

        targets = until(lambda: all_up(watching.ask("targets")["activeTargets"]))
        assert targets == 3
        until(lambda: not watching.firing())  # Before the first scrape there was no server.

        async with load(served):
            await eventually(
                lambda: fire(
                    *("TrtllmBlsFailures", "TrtllmBlsOverloaded", "TrtllmBlsNothingEnds"),
                    *("TrtllmBlsQueue", "TrtllmBlsSlowFirstToken", "TrtllmBlsStreamsPause"),
                    *("TrtllmBlsDeadlines", "TrtllmBlsUnreadableCalls"),
                ),
                seconds=240,
            )
            (worker,) = psutil.Process(served.pids["HTTP"]).children()
            if can_starve:
                with short_of_cpu(worker):
                    await eventually(lambda: fire("TrtllmBlsEventLoopLag"), seconds=120)
        for service, _ in engines:
            service.behaviour = replace(service.behaviour, health="NOT_OK")
        await eventually(lambda: fire("TrtllmBlsEngineOut", "TrtllmBlsNotReady"), seconds=120)
        for service, _ in engines:
            service.behaviour = replace(service.behaviour, health="OK")
        assert restarts(served) == 0
        for count in range(1, 4):
            (http,) = await eventually(lambda: served.children(served.process.pid, "openai"))
            http.kill()
            await eventually(lambda count=count: restarts(served) == count and is_well(served))
        await eventually(lambda: fire("TrtllmBlsRestarts"), seconds=120)
        metrics = {
            metric
            for name, expression in alerts().items()
            for metric in re.findall(r"\b(?:trtllm_bls|gen_ai)_\w+", expression)
            if name not in NOT_HERE
        }
        assert [metric for metric in sorted(metrics) if not watching.has(metric)] == []
        served.process.terminate()
        assert served.end()[0] == 0
        await eventually(lambda: fire("TrtllmBlsAbsent"), seconds=120)
    if not can_starve:
        assert fired | {"TrtllmBlsEventLoopLag"} == expected
        pytest.skip("all but the lag's alert: this user may not run in real time; root runs it")
    assert fired == expected


def address(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def restarts(served: Served) -> int:
    """How often the HTTP program was started again."""
    url = served.urls["health"].replace("/health/ready", "/metrics")
    with urllib.request.urlopen(url, timeout=20) as answer:
        (count,) = re.findall(r"openai_restarts_total (\d+)", answer.read().decode())
    return int(count)


def is_well(served: Served) -> bool:
    with suppress(OSError):
        return bool(good(served.urls["health"])["ok"])
    return False


def all_up(targets: list[dict[str, Any]]) -> int:
    """The number of targets once each of them answers."""
    return len(targets) if all(target["health"] == "up" for target in targets) else 0
