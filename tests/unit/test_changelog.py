"""The newest section of the changelog is a page: one line a change, in five groups."""

from __future__ import annotations

import re

from tests.helpers.server_settings import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed"]


def newest_section() -> str:
    """The first section, without its heading."""
    return re.split(r"^## .*\n", TEXT, maxsplit=2, flags=re.M)[1]


def test_the_newest_section_is_grouped() -> None:
    """Each group at most once, in one order, and none is empty."""
    section = newest_section()
    groups = re.findall(r"^### (.*)$", section, re.M)
    assert groups == [group for group in GROUPS if group in groups]
    for group in re.split(r"^### .*\n", section, flags=re.M)[1:]:
        assert group.lstrip("\n").startswith("- ")


def test_a_change_is_one_line_of_the_newest_section() -> None:
    """Without a blank line between two, and no change twice.

    If a merge has brought lines back that were shortened, take the file of the branch before and
    add the new line.
    """
    for group in re.split(r"^### .*\n", newest_section(), flags=re.M)[1:]:
        lines = group.strip("\n").splitlines()
        assert [line for line in lines if not line.startswith("- ")] == []
    changes = [line for line in newest_section().splitlines() if line.startswith("- ")]
    assert len(set(changes)) == len(changes)
    assert [line for line in changes if len(line) > 180] == []
