"""docs/engines.md says of each engine what the engine itself says."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.refusals import table

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_table_of_refusals_is_what_the_engines_answer() -> None:
    """``python -m tests.conformance.refusals`` prints the table that belongs there."""
    assert table() in DOCS.read_text(encoding="utf-8")
