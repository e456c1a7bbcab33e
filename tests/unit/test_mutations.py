"""The list of mutations names places that the package has."""

from __future__ import annotations

import pytest

from tests.helpers.server_settings import ROOT

PARAGRAPHS = (ROOT / "tests" / "mutations.txt").read_text(encoding="utf-8").strip().split("\n\n")


@pytest.mark.parametrize("number", range(len(PARAGRAPHS)))
def test_a_mutation_changes_one_place(number: int) -> None:
    """A renamed line has its mutation renamed, too."""
    place, *lines = PARAGRAPHS[number].splitlines()
    (text,) = [line[2:].replace("⏎", "\n") for line in lines if line.startswith("- ")]
    assert (ROOT / place).read_text(encoding="utf-8").count(text) == 1, (place, text)
