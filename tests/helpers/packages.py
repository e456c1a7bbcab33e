"""Packages that some environments lack, as that of `make test-lowest`."""

from __future__ import annotations

from types import ModuleType

import pytest


def import_or_skip(name: str) -> ModuleType:
    """Import a module, or skip with the line that installs it."""
    reason = f"no {name}: `pip install -e '.[dev,openai]'` runs it"
    module: ModuleType = pytest.importorskip(name, reason=reason)
    return module
