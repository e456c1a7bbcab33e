"""The pages say of each engine what the engine itself says."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.refusals import tables

ROOT = Path(__file__).parents[2]


def test_the_tables_of_refusals_are_what_the_engines_answer() -> None:
    """``python -m tests.conformance.refusals`` prints the tables that belong there."""
    honoured, refusals = tables()
    assert honoured in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert refusals in (ROOT / "tests" / "conformance" / "README.md").read_text(encoding="utf-8")
