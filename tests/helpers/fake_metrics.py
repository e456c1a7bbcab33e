"""Triton's custom metrics without Triton, keeping the rules that abort the real server.

A counter never shrinks; a histogram only observes, the others never do; label values are strings;
buckets are sorted. Series of one name and labels add up, whoever made them.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any


class Registry:
    """``pb_utils`` as far as metrics go, for any number of processes; ``values`` is the scrape.

    A histogram's value is its observations. ``alive``: families and series that Python has not
    freed.
    """

    def __init__(self, histograms: bool = True) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        kinds = {"COUNTER": "counter", "GAUGE": "gauge"}
        if histograms:
            kinds["HISTOGRAM"] = "histogram"
        self.MetricFamily = type("MetricFamily", (_Family,), {"registry": self, **kinds})

    def of(self, name: str, **labels: str) -> Any:
        """The value of one series."""
        return self.values[name, tuple(sorted(labels.items()))]

    def numbers(self, name: str) -> dict[tuple[str, ...], Any]:
        """The values of a family's series that are not zero, by label values in order of names,
        without the model's."""
        return {
            tuple(value for key, value in labels if key != "model"): found
            for (family, labels), found in self.values.items()
            if family == name and found
        }


class _Family:
    registry: Registry

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description and self.registry.kinds.setdefault(name, kind) == kind
        self._name, self._kind = name, kind
        self.registry.alive.add(self)

    def Metric(
        self, labels: Mapping[str, str], buckets: Sequence[float] | None = None
    ) -> Histogram | Number:
        assert all(isinstance(value, str) for value in labels.values())
        key = (self._name, tuple(sorted(labels.items())))
        if self._kind == "histogram":
            assert buckets and list(buckets) == sorted(buckets)
            self.registry.values.setdefault(key, [])
            return Histogram(self.registry, key)
        assert buckets is None
        self.registry.values.setdefault(key, 0)
        return Number(self.registry, key, self._kind)


class Number:
    def __init__(self, registry: Registry, key: Any, kind: str) -> None:
        self._registry, self._key, self._kind = registry, key, kind
        registry.alive.add(self)

    def increment(self, value: float) -> None:
        assert value >= 0 or self._kind == "gauge"
        self._registry.values[self._key] += value


class Histogram:
    def __init__(self, registry: Registry, key: Any) -> None:
        self._registry, self._key = registry, key
        registry.alive.add(self)

    def observe(self, value: float) -> None:
        bisect.insort(self._registry.values[self._key], value)
