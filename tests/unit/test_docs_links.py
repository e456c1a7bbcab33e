"""Links and paths in the pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests" / "conformance" / "README.md",
    ROOT / "assets" / "demo" / "README.md",
]
PAGES_OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells of the past
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
# A file or folder of the repository, named in backticks by its path from the root.
PATH = re.compile(
    r"`((?:trtllm_bls|tests|docs|benchmarks|deploy|doubles|models|client|assets)/[\w./-]+)"
)


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    """Also to a heading of another page."""
    wrong = []
    for target, anchor in LINK.findall(prose(page)):
        place = (page.parent / target).resolve() if target else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES_OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_are_named_exist(page: Path) -> None:
    """A file that is renamed is renamed in the pages, too."""
    named = {path.rstrip("/.") for path in PATH.findall(prose(page))}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


ROW = re.compile(r"\|(?:[^|\\]|\\.)*(?=\|)")  # a cell, with the line before it


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """Each has a heading and a line below it, and every row as many cells: no row stands alone."""
    lines = [line.strip() for line in prose(page).split("\n")]
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        begins = not lines[number - 1].startswith("|")
        if begins:
            assert re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", lines[number + 1]), line
            cells = len(ROW.findall(line))
        assert len(ROW.findall(line)) == cells, line
