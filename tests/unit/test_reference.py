"""docs/reference.md is what the public names say of themselves, to be read where it lies."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers.server_settings import ROOT
from tests.unit.test_public_names import PUBLIC

PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_docstrings_say() -> None:
    """``make generate`` writes it."""
    assert runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))["page"]() == PAGE


@pytest.mark.parametrize("module", [name for name in PUBLIC if ".triton." not in name])
def test_the_page_has_every_public_name(module: str) -> None:
    section = PAGE.partition(f"\n## {module}\n")[2].partition("\n## ")[0]
    missing = [name for name in PUBLIC[module] if f"\n### {name}\n" not in section]
    assert missing == []
