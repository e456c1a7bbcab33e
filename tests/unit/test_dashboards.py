"""The dashboard, the alert rules and the document speak of metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from trtllm_bls.errors import CancelCause
from trtllm_bls.operate.watch import SERVER_METRICS
from trtllm_bls.orchestrator.reports import METRICS
from trtllm_bls.types import Outcome

ROOT = Path(__file__).parents[2]
SERIES = {
    f"{metric.name}{suffix}": metric
    for metric in METRICS
    for suffix in (("_bucket", "_sum", "_count") if metric.buckets else ("",))
}
LABELS = {name: (*metric.labels, "model") for name, metric in SERIES.items()}
LABELS |= {metric.name: metric.labels for metric in SERVER_METRICS}
VALUES = {"outcome": {outcome.value for outcome in Outcome}}
VALUES["reason"] = {cause.value for cause in CancelCause}


def expressions() -> list[str]:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [rule["expr"] for rule in rules] + asked


def of_the_page() -> list[str]:
    """The queries that docs/metrics.md advises."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("| question | expression |")[2].partition("\n\n")[0]
    return [found for found in re.findall("`([^`]+)`", table) if "trtllm_bls_" in found]


def selectors(node: Any) -> Iterator[Any]:
    """Every selector of a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        if (child := getattr(node, name, None)) is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


def test_every_outcome_has_a_colour_of_its_own() -> None:
    """Success is green and failure red, whichever Grafana would have taken."""
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    (panel,) = [each for each in panels if each["title"] == "Requests by outcome"]
    colours = {
        each["matcher"]["options"]: each["properties"][0]["value"]["fixedColor"]
        for each in panel["fieldConfig"]["overrides"]
    }
    assert colours.keys() == VALUES["outcome"] and len(set(colours.values())) == len(colours)
    assert (colours["success"], colours["failed"]) == ("green", "red")


@pytest.mark.parametrize("expression", [*expressions(), *of_the_page()])
def test_an_expression_asks_for_what_there_is(expression: str) -> None:
    """By Prometheus' grammar; its metrics, their labels and the labels' values are ours."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    found = list(selectors(parsed))
    named = re.findall(r"\b(?:trtllm_bls|gen_ai)_\w+", expression)
    assert sorted(selector.name for selector in found) == sorted(named)
    assert named
    for selector in found:
        for matcher in selector.matchers.matchers:
            assert matcher.name in LABELS[selector.name]
            if matcher.name in VALUES:
                assert set(matcher.value.split("|")) <= VALUES[matcher.name]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: `apt-get install prometheus` runs it"
)
@pytest.mark.parametrize("what", [("check", "alerts.yaml"), ("test", "alerts_test.yaml")])
def test_each_alert_fires_when_it_should(what: tuple[str, str]) -> None:
    """By Prometheus itself, and none where the server is well."""
    order = ["promtool", what[0], "rules", str(ROOT / "deploy" / what[1])]
    done = subprocess.run(order, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = (ROOT / "deploy" / "alerts_test.yaml").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in tests] == []


def test_every_metric_is_on_the_dashboard_and_in_the_document() -> None:
    """With its kind, its labels and what it counts."""
    shown = " ".join(expressions())
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    ours = (*METRICS, *SERVER_METRICS)
    assert told == {metric.name: (metric.kind, metric.labels) for metric in ours}
    assert [metric.name for metric in ours if metric.name not in shown] == []
