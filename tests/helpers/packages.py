"""Packages that some environments lack, as that of `make test-lowest`."""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import pytest


def import_or_skip(name: str) -> ModuleType:
    """Import a module, or skip with the line that installs it."""
    reason = f"no {name}: `pip install -e '.[dev,openai]'` runs it"
    module: ModuleType = pytest.importorskip(name, reason=reason)
    return module


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where a module is not installed."""
    return pytest.mark.skipif(find_spec(name) is None, reason=f"no {name}: `make test` runs it")
